#include "model.h"

namespace tandem {

template void linear_of<BFloat16>(TensorView, TensorView, TensorView, TensorView, int64_t);
template Map<String, Function> functions_of<BFloat16>(Map<String, double>, Tensors, Array<Tensors>, Array<int64_t>);

}  // namespace tandem
