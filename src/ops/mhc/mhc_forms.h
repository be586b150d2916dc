/* Prototypes of the ops of this folder, whose contract has no field lists. */
#ifndef BRAID_OPS_MHC_FORMS_H
#define BRAID_OPS_MHC_FORMS_H

#include "ops/op.h"

struct mhc_project_fwd_args;
OP_FORMS(mhc_project_fwd)
struct mhc_project_bwd_args;
OP_FORMS(mhc_project_bwd)
struct mhc_gates_fwd_args;
OP_FORMS(mhc_gates_fwd)
struct mhc_gates_bwd_args;
OP_FORMS(mhc_gates_bwd)
struct mhc_sinkhorn_fwd_args;
OP_FORMS(mhc_sinkhorn_fwd)
struct mhc_sinkhorn_bwd_args;
OP_FORMS(mhc_sinkhorn_bwd)
struct mhc_aggregate_fwd_args;
OP_FORMS(mhc_aggregate_fwd)
struct mhc_aggregate_bwd_args;
OP_FORMS(mhc_aggregate_bwd)
struct mhc_combine_fwd_args;
OP_FORMS(mhc_combine_fwd)
struct mhc_combine_bwd_args;
OP_FORMS(mhc_combine_bwd)
struct mhc_expand_fwd_args;
OP_FORMS(mhc_expand_fwd)
struct mhc_expand_bwd_args;
OP_FORMS(mhc_expand_bwd)
struct mhc_contract_fwd_args;
OP_FORMS(mhc_contract_fwd)
struct mhc_contract_bwd_args;
OP_FORMS(mhc_contract_bwd)
struct mhc_boundary_fwd_args;
OP_FORMS(mhc_boundary_fwd)
struct mhc_boundary_bwd_args;
OP_FORMS(mhc_boundary_bwd)
struct mhc_boundary_dw_args;
OP_FORMS(mhc_boundary_dw)
struct mhc_leave_fwd_args;
OP_FORMS(mhc_leave_fwd)
struct mhc_leave_bwd_args;
OP_FORMS(mhc_leave_bwd)
struct mhc_rebuild_args;
OP_FORMS(mhc_rebuild)
struct mhc_health_args;
OP_FORMS(mhc_health)

#endif
