/* The lists of layer kinds and of residual connections, made from cores.def and joints.def. */
#include "layers/layer.h"

#define CORE(name) extern const struct core_kind core_##name;
#include "layers/cores.def"
#undef CORE
#define JOINT(name) extern const struct joint_kind joint_##name;
#include "layers/joints.def"
#undef JOINT

const struct core_kind *const *core_kinds(int *n)
{
    static const struct core_kind *const all[] = {
#define CORE(name) &core_##name,
#include "layers/cores.def"
#undef CORE
    };
    _Static_assert(countof(all) <= KIND_MAX_CORES, "sets of kinds are bits of a word");
    *n = countof(all);
    return all;
}

const struct joint_kind *const *joint_kinds(int *n)
{
    static const struct joint_kind *const all[] = {
#define JOINT(name) &joint_##name,
#include "layers/joints.def"
#undef JOINT
    };
    *n = countof(all);
    return all;
}
