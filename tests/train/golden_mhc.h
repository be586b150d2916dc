/* The loss of 50 steps on the reference device (double): hyper-connections, recompute in blocks of 2, dropout, resumed
 * at step 25. Made by `test_mhc --print`, once for each libm: glibc on x86-64 with fused multiply-add, and without
 * (GLIBC_TUNABLES=glibc.cpu.hwcaps=-FMA,-AVX2,-FMA4,-AVX512F). */
#ifndef BRAID_TESTS_TRAIN_GOLDEN_MHC_H
#define BRAID_TESTS_TRAIN_GOLDEN_MHC_H

#include <stdint.h>

struct golden_curve {
    uint64_t libm; /* hash of what its functions give */
    double loss[50];
};
static const struct golden_curve golden_mhc[] = {
    {.libm = 0x0becedf7137d2fb4,
     .loss = {0x1.63f28a3181858p+2, 0x1.61ce112c8ec32p+2, 0x1.623054df072d4p+2, 0x1.5e65b9fea8488p+2,
              0x1.5c0f3f47a2fb2p+2, 0x1.5775ec766875ep+2, 0x1.553b48ba4973fp+2, 0x1.4ebcf25d2f1aap+2,
              0x1.4cb5db358c618p+2, 0x1.499a0e1d9f772p+2, 0x1.486b59f8adda7p+2, 0x1.429b77686a61ep+2,
              0x1.3fa72188b9b6p+2,  0x1.3c46a47b40b44p+2, 0x1.37f8822b665f4p+2, 0x1.35d36909334bp+2,
              0x1.314346b485d1ep+2, 0x1.2efda220385ccp+2, 0x1.2ab9fb970d132p+2, 0x1.2743774648f77p+2,
              0x1.24de1bfe1534p+2,  0x1.2121981f69209p+2, 0x1.1f49efc0b73edp+2, 0x1.1c7475233bde5p+2,
              0x1.198e54c06d337p+2, 0x1.17734f7d1afa8p+2, 0x1.15b08f3f166fcp+2, 0x1.15d49be9b0ff8p+2,
              0x1.137c8ec4484cap+2, 0x1.0e91124d52a7ap+2, 0x1.0e1e96b778b15p+2, 0x1.0d7d69bb2b9d6p+2,
              0x1.0cafe1df2113ep+2, 0x1.0cde0e008757ep+2, 0x1.073f23148dd74p+2, 0x1.0874cb8a94452p+2,
              0x1.09dcd1532ae48p+2, 0x1.07a109eaaad44p+2, 0x1.083ff0495c1cep+2, 0x1.06dd68089a3f6p+2,
              0x1.0617b08cdad38p+2, 0x1.06c7d7a0bd446p+2, 0x1.05edfc2e33e4dp+2, 0x1.05cb5c622a6f4p+2,
              0x1.038a4dcb2aaa3p+2, 0x1.0410d6638dc0cp+2, 0x1.053f7c80c2eb2p+2, 0x1.04f185e8b976p+2,
              0x1.02de03a61ee3p+2,  0x1.04374b042fa8ap+2}},
    {.libm = 0x97f325b360e29062,
     .loss = {0x1.63f28a3181858p+2, 0x1.61ce112c8ec32p+2, 0x1.623054df072d4p+2, 0x1.5e65b9fea8488p+2,
              0x1.5c0f3f47a2fb2p+2, 0x1.5775ec766875fp+2, 0x1.553b48ba4973fp+2, 0x1.4ebcf25d2f1aap+2,
              0x1.4cb5db358c618p+2, 0x1.499a0e1d9f772p+2, 0x1.486b59f8adda7p+2, 0x1.429b77686a61ep+2,
              0x1.3fa72188b9b6p+2,  0x1.3c46a47b40b44p+2, 0x1.37f8822b665f5p+2, 0x1.35d36909334bp+2,
              0x1.314346b485d1fp+2, 0x1.2efda220385ccp+2, 0x1.2ab9fb970d132p+2, 0x1.2743774648f77p+2,
              0x1.24de1bfe1534p+2,  0x1.2121981f69209p+2, 0x1.1f49efc0b73edp+2, 0x1.1c7475233bde4p+2,
              0x1.198e54c06d338p+2, 0x1.17734f7d1afa7p+2, 0x1.15b08f3f166fbp+2, 0x1.15d49be9b0ff8p+2,
              0x1.137c8ec4484cap+2, 0x1.0e91124d52a7ap+2, 0x1.0e1e96b778b15p+2, 0x1.0d7d69bb2b9d6p+2,
              0x1.0cafe1df2113ep+2, 0x1.0cde0e008757ep+2, 0x1.073f23148dd75p+2, 0x1.0874cb8a94452p+2,
              0x1.09dcd1532ae48p+2, 0x1.07a109eaaad44p+2, 0x1.083ff0495c1cep+2, 0x1.06dd68089a3f6p+2,
              0x1.0617b08cdad38p+2, 0x1.06c7d7a0bd447p+2, 0x1.05edfc2e33e4dp+2, 0x1.05cb5c622a6f4p+2,
              0x1.038a4dcb2aaa2p+2, 0x1.0410d6638dc0dp+2, 0x1.053f7c80c2eb2p+2, 0x1.04f185e8b9762p+2,
              0x1.02de03a61ee3p+2,  0x1.04374b042fa89p+2}},
};

#endif
