/* Where the rows of a parameter are in the tensors of a folder: the one map that import and export share. */
#include "hf/hf_int.h"

struct hf_matrix hf_matrix_of(const struct param *p)
{
    struct hf_matrix m = {.experts = p->expert ? p->dim[0] : 1, .rows = p->dim[p->expert ? 1 : 0]};
    m.cols = m.rows > 0 && m.experts > 0 ? param_elems(p) / (m.experts * m.rows) : 0;
    return m;
}

int hf_span_of(const struct hf_rule *r, int part, const struct config_model *m, int64_t rows, struct hf_span *s,
               struct err *e)
{
    const struct hf_part *p = &r->part[part];
    int64_t sum = 0;
    *s = (struct hf_span){.groups = r->groups ? hf_size(m, r->groups) : 1};
    for (int i = 0; i < HF_MAX_PARTS && r->part[i].name != NULL; i++) {
        int64_t n = r->part[i].rows ? hf_size(m, r->part[i].rows) : rows;
        if (s->groups < 1 || n % s->groups != 0)
            return err_set(e, ST_INVALID, "%lld rows of %s cannot be cut into %lld groups", (long long)n,
                           r->part[i].name, (long long)s->groups);
        if (i == part)
            s->group_at = sum, s->rows = n;
        sum += n / s->groups;
    }
    if (sum * s->groups != rows)
        return err_set(e, ST_INVALID, "the parts of %s have %lld rows together, the parameter has %lld", r->key,
                       (long long)(sum * s->groups), (long long)rows);
    s->per_group = s->rows / s->groups;
    s->group_rows = sum;
    s->chunk = p->chunk ? hf_size(m, p->chunk) : max_i64(s->rows, 1);
    s->stride = p->stride ? hf_size(m, p->stride) : s->chunk;
    s->offset = p->offset ? hf_size(m, p->offset) : 0;
    if (s->chunk < 1 || s->rows % s->chunk != 0 || s->stride < s->chunk)
        return err_set(e, ST_INVALID, "%lld rows of %s cannot be cut into runs of %lld", (long long)s->rows, p->name,
                       (long long)s->chunk);
    s->total = s->rows / s->chunk * s->stride;
    s->pairs = p->pairs ? hf_size(m, p->pairs) : 0;
    return ST_OK;
}

static int64_t param_row(const struct hf_span *s, int64_t j)
{
    return j / s->per_group * s->group_rows + s->group_at + j % s->per_group;
}

static int64_t tensor_row(const struct hf_span *s, int64_t j)
{
    int64_t row = s->offset + j / s->chunk * s->stride + j % s->chunk;
    if (s->pairs == 0)
        return row;
    int64_t half = s->pairs / 2, in_head = row % s->pairs;
    return row - in_head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1);
}

void hf_copy_in(const struct hf_span *s, int64_t cols, bool transposed, float add, float *param, const float *tensor)
{
    for (int64_t j = 0; j < s->rows; j++) {
        float *to = param + param_row(s, j) * cols;
        const float *from = tensor + (transposed ? tensor_row(s, j) : tensor_row(s, j) * cols);
        int64_t step = transposed ? s->total : 1;
        for (int64_t c = 0; c < cols; c++)
            to[c] = add != 0 ? from[c * step] + add : from[c * step];
    }
}

void hf_copy_out(const struct hf_span *s, int64_t cols, bool transposed, float add, const float *param, float *tensor)
{
    for (int64_t j = 0; j < s->rows; j++) {
        const float *from = param + param_row(s, j) * cols;
        float *to = tensor + (transposed ? tensor_row(s, j) : tensor_row(s, j) * cols);
        int64_t step = transposed ? s->total : 1;
        for (int64_t c = 0; c < cols; c++)
            to[c * step] = add != 0 ? from[c] - add : from[c];
    }
}

int hf_part_shape(const struct hf_rule *r, const struct hf_span *s, const struct param *p, int64_t dim[TENSOR_MAX_RANK])
{
    struct hf_matrix m = hf_matrix_of(p);
    int rank = 0, matrix_at = p->expert ? 1 : 0;
    if (r->flags & HF_FUSED)
        dim[rank++] = m.experts;
    if (r->flags & HF_TRANSPOSED) {
        dim[rank++] = m.cols;
        dim[rank++] = s->total;
        return rank;
    }
    dim[rank++] = s->total;
    for (int i = matrix_at + 1; i < p->rank; i++)
        dim[rank++] = p->dim[i];
    return rank;
}
