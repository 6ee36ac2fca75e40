// runner.cpp: one launch in a process of its own, where a sanitizer has to be there from the start.
//
//   runner KERNEL.so NAME REQUEST RESULT REPORT
//
// The request holds a Header, `memories` Memory records, the parameters, and the bytes of each memory. Each
// memory gets an allocation of exactly its size, so that a sanitizer sees its edges, and its address goes
// into the parameters. RESULT gets the bytes of the written ones; REPORT first the place of each memory, then
// what the scheduler found.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "launch.h"

extern "C" void __asan_poison_memory_region(const volatile void* begin, size_t bytes) __attribute__((weak));

namespace {

struct Header {
  unsigned grid[3], block[3];
  unsigned shared_bytes, schedule, multiprocessors, params_bytes, memories, padding;
  unsigned long long seed;
};

struct Memory {
  unsigned long long bytes;
  unsigned param_offset, offset_in_line;  // where its address stands; how far it lies past a multiple of 256
  unsigned written, same;                 // 1 + the number of an earlier one that is the same memory, or 0
};

[[noreturn]] void give_up(const char* what) {
  fprintf(stderr, "runner: %s\n", what);
  exit(2);
}

void read_exactly(FILE* file, void* to, size_t bytes) {
  if (bytes && fread(to, 1, bytes, file) != bytes) give_up("the request is too short");
}

}  // namespace

int main(int count, char** words) {
  if (count != 6) give_up("runner KERNEL.so NAME REQUEST RESULT REPORT");
  void* library = dlopen(words[1], RTLD_NOW);
  if (!library) give_up(dlerror());
  void* enter = dlsym(library, (std::string("fagen_enter_") + words[2]).c_str());
  if (!enter) give_up(dlerror());
  const auto params_bytes = reinterpret_cast<unsigned (*)()>(
      dlsym(library, (std::string("fagen_params_bytes_of_") + words[2]).c_str()));

  FILE* file = fopen(words[3], "rb");
  if (!file) give_up("no request");
  Header header;
  read_exactly(file, &header, sizeof header);
  std::vector<Memory> memories(header.memories);
  read_exactly(file, memories.data(), memories.size() * sizeof(Memory));
  if (header.params_bytes != params_bytes()) give_up("the parameters have another size");
  void* params = nullptr;
  if (posix_memalign(&params, 128, header.params_bytes)) give_up("no memory");
  read_exactly(file, params, header.params_bytes);

  FILE* report_file = fopen(words[5], "wb");
  if (!report_file) give_up("no report");
  std::vector<char*> begins;
  for (const Memory& memory : memories) {
    void* whole = nullptr;
    char* begin = nullptr;
    if (memory.same) {
      begin = begins[memory.same - 1];
    } else {
      if (posix_memalign(&whole, 256, memory.offset_in_line + memory.bytes)) give_up("no memory");
      begin = static_cast<char*>(whole) + memory.offset_in_line;
      if (__asan_poison_memory_region) __asan_poison_memory_region(whole, memory.offset_in_line);
      read_exactly(file, begin, memory.bytes);
    }
    memcpy(static_cast<char*>(params) + memory.param_offset, &begin, sizeof begin);
    begins.push_back(begin);
    fprintf(report_file, "%llx %llx\n", reinterpret_cast<unsigned long long>(begin), memory.bytes);
  }
  fclose(file);
  fflush(report_file);

  std::vector<char> report(1 << 16);
  FagenLaunch launch = {};
  launch.enter = reinterpret_cast<void (*)(const void*)>(enter);
  launch.params = params;
  memcpy(launch.grid, header.grid, sizeof header.grid);
  memcpy(launch.block, header.block, sizeof header.block);
  launch.shared_bytes = header.shared_bytes;
  launch.schedule = static_cast<int>(header.schedule);
  launch.seed = header.seed;
  launch.multiprocessors = header.multiprocessors;
  launch.workers = 1;
  launch.report = report.data();
  launch.report_bytes = static_cast<unsigned>(report.size());
  const int failed = fagen_launch(&launch);

  fputs(report.data(), report_file);
  fclose(report_file);
  file = fopen(words[4], "wb");
  if (!file) give_up("no result");
  for (size_t i = 0; i < memories.size(); ++i) {
    if (memories[i].written && memories[i].bytes && !memories[i].same)
      fwrite(begins[i], 1, memories[i].bytes, file);
  }
  fclose(file);
  return failed;
}
