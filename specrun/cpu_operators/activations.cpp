// What stands in front of a product: norms and gates, a row at a time.
#include "activations.h"

#include <cmath>

#define KERNELS "activations_kernels.h"
#include "on_every_processor.h"

namespace specrun {

void make_row(const Activations& activations, int64_t row, float* y) {
    ON_THIS_PROCESSOR(make_row)(activations, row, y);
}

}  // namespace specrun
