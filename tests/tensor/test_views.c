/* tensor/: views. */
#include "support.h"
#include "tensor/tensor.h"

/* Layers take views of gradients that only training has. Elsewhere the tensor is all zero, and so must its views be. */
static void an_absent_tensor_has_absent_views(void **state)
{
    (void)state;
    const struct tensor none = {0};
    const struct tensor views[] = {tensor_cols(&none, 3, 5), tensor_rows(&none, 3, 5), tensor_split_last(&none, 2, 4),
                                   tensor_split_first(&none, 2, 4)};
    for (int i = 0; i < countof(views); i++) {
        assert_null(views[i].data);
        assert_int_equal(views[i].dtype, none.dtype);
        assert_int_equal(views[i].rank, 0);
        for (int d = 0; d < countof(views[i].dim); d++)
            assert_int_equal(views[i].dim[d], 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_absent_tensor_has_absent_views),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
