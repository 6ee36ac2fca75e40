// launch.h: what the scheduler is asked to run.
#pragma once

extern "C" {

struct FagenLaunch {
  void (*enter)(const void* params);
  const void* params;
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  int schedule;  // 0 forward, 1 backward, 2 random
  unsigned long long seed;
  unsigned multiprocessors;  // that hold the live blocks; 0: the seed chooses
  unsigned workers;          // OS threads among which the blocks are dealt
  char* report;
  unsigned report_bytes;
};

// Runs one launch to its end; 0, or 1 with a finding written to `report`.
int fagen_launch(const FagenLaunch* request);
}
