// operands.cuh: tiles of tensor-core operands brought into shared memory by a whole block, the same text as on a
// GPU.
#pragma once

#include "async.cuh"
#include "math.cuh"
#include "mma.cuh"
#include "quad.cuh"

#include "../device/operands.cuh"
