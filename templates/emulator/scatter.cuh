// scatter.cuh: elements of a tile added to memory, the same text as on a GPU.
#pragma once

#include "atomic.cuh"
#include "exact.cuh"
#include "warp.cuh"

#include "../device/scatter.cuh"
