// The kinds of pass through a model.
#pragma once

namespace tessera {

/// Forward passes are told apart by whether they build a graph.
enum class Pass { None, Training, Evaluation, Backward };

}  // namespace tessera
