"""The kernels on a GPU: what the files test_device*.py in tests/kernels ask of them on the CPU."""

import pytest
from kernels.test_device import (  # noqa: F401
    run,
    test_an_output_may_be_an_input,
    test_cast,
    test_cast_of_every_float16_and_bfloat16,
    test_combine_of_many_chunks,
    test_decode_divides_as_exactly_as_the_host,
    test_element_wise_steps,
    test_every_nan_on_the_wire_is_decoded_to_the_canonical_one,
    test_few_ctas_do_the_work_of_many,
    test_golden_bytes,
    test_minmax,
    test_minmax_of_special_values_in_whole_blocks_and_at_odd_addresses,
    test_reduce_rows,
    test_steps_without_weight_decay_or_nesterov,
)
from kernels.test_device_int4 import (  # noqa: F401
    test_any_bytes_are_decoded_and_combined_as_on_the_host,
    test_few_ctas_do_the_work_of_many_with_int4,
    test_int4,
    test_int4_of_many_rows,
    test_int4_of_special_values_in_whole_blocks_and_at_odd_addresses,
)
from kernels.test_device_top_k import (  # noqa: F401
    test_any_settings,
    test_few_ctas_do_the_work_of_many_with_top_k,
    test_golden_bytes_of_top_k,
    test_of_equal_magnitudes_the_device_sends_those_of_lower_indices,
    test_top_k,
    test_top_k_of_special_values_and_at_odd_addresses,
)

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["real"], indirect=True)]


@pytest.fixture(autouse=True)
def no_pool(device):
    """Memory straight from the driver, where compute-sanitizer sees the end of each array."""
    import cupy

    cupy.cuda.set_allocator(None)
    yield
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
