// tiles.cuh: matrices in shared memory, the same text as on a GPU.
#pragma once

#include "shared.cuh"

#include "../device/tiles.cuh"
