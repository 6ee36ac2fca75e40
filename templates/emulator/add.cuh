// add.cuh: sums added to global memory, the same text as on a GPU.
#pragma once

#include "atomic.cuh"

#include "../device/add.cuh"
