// quad.cuh: four neighbouring lanes, the same text as on a GPU.
#pragma once

#include "warp.cuh"

#include "../device/quad.cuh"
