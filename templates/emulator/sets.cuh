// sets.cuh: the sets of sixteen rows that a warp has, the same text as on a GPU.
#pragma once

#include "warp.cuh"

#include "../device/sets.cuh"
