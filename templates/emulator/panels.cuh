// panels.cuh: tiles in shared memory as bulk tensor copies write them, the same text as on a GPU.
#pragma once

#include "shared.cuh"

#include "../device/panels.cuh"
