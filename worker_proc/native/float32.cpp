#include "model.h"

namespace tandem {

template void linear_of<Float32>(TensorView, TensorView, TensorView, TensorView, int64_t);
template Map<String, Function> functions_of<Float32>(Map<String, double>, Tensors, Array<Tensors>, Array<int64_t>);

}  // namespace tandem
