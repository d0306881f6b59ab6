// Streams and memory of the pretend accelerator: who used which memory last, and who has waited for that.
//
// Every stream, and the host, has a vector clock: how many operations of each stream it knows to be done.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <pybind11/pybind11.h>

#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// ---------------------------------------------------------------------------- streams

using StreamId = int64_t;

// How many operations of each stream are known to be done.
struct Clock {
  std::vector<uint64_t> times;

  uint64_t of(StreamId stream) const {
    return static_cast<size_t>(stream) < times.size() ? times[stream] : 0;
  }
  uint64_t& at(StreamId stream) {
    if (static_cast<size_t>(stream) >= times.size()) times.resize(stream + 1, 0);
    return times[stream];
  }
  void join(const Clock& other) {
    for (size_t i = 0; i < other.times.size(); ++i) at(i) = std::max(of(i), other.times[i]);
  }
};

struct Use {
  uint64_t time = 0;
  std::string operation;
};

struct Block {
  size_t bytes = 0;
  StreamId owner = 0;   // the stream that was current where it was allocated
  StreamId writer = 0;  // the stream of the last write
  Use write;
  std::map<StreamId, Use> uses;     // the last of each stream since the last write
  std::set<StreamId> recorded;      // by `record_stream`
};

// Memory that went back to its stream while another stream may still use it.
struct Freed {
  StreamId user;
  Use use;
};

// A copy to the host that nobody has waited for.
struct Arriving {
  StreamId stream;
  uint64_t time;
  std::function<void()> copy;
};

std::recursive_mutex lock;  // of all below
std::vector<Clock> streams(1);
Clock host;
std::map<const char*, Block> blocks;
std::map<StreamId, std::vector<Freed>> freed;
std::vector<Arriving> arriving;
std::map<const void*, StreamId> of_groups;
size_t held = 0, limit = 0;
thread_local StreamId current = 0;
PyObject* on_wait = nullptr;

using Guarded = std::lock_guard<std::recursive_mutex>;

StreamId new_stream() {
  Guarded guard(lock);
  streams.emplace_back();
  return static_cast<StreamId>(streams.size() - 1);
}

// Begins an operation on a stream: after all that the host had waited for.
uint64_t advance(StreamId stream) {
  streams[stream].join(host);
  return ++streams[stream].at(stream);
}

Clock up_to_now(StreamId stream) {
  Guarded guard(lock);
  streams[stream].join(host);
  return streams[stream];
}

// Makes the copies that a clock knows to be done; outside of the lock, because they may need Python's.
void arrive(const Clock& known) {
  std::vector<Arriving> ready, left;
  {
    Guarded guard(lock);
    for (auto& one : arriving) (known.of(one.stream) >= one.time ? ready : left).push_back(std::move(one));
    arriving = std::move(left);
  }
  for (auto& one : ready) one.copy();
}

void host_waits_for(const Clock& clock) {
  Clock known;
  {
    Guarded guard(lock);
    host.join(clock);
    known = host;
  }
  arrive(known);
}

void report_wait(const std::string& kind) {
  if (on_wait == nullptr) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::reinterpret_borrow<pybind11::object>(on_wait)(kind);
}

// ---------------------------------------------------------------------------- memory

const char* base_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.storage().data());
}

// Checks one access and remembers it. `time` is of the operation, on the current stream.
void access(const at::Tensor& tensor, bool writes, uint64_t time, const std::string& operation) {
  auto found = blocks.find(base_of(tensor));
  if (found == blocks.end() || tensor.numel() == 0) return;
  Block& block = found->second;
  const Clock& known = streams[current];
  auto check = [&](StreamId other, const Use& use, const char* done) {
    TORCH_CHECK(other == current || known.of(other) >= use.time, "pretend: ", operation, " on stream ",
                current, writes ? " writes" : " reads", " memory that ", use.operation, " on stream ", other, " ", done,
                ", and did not wait for it.");
  };
  check(block.writer, block.write, "wrote");
  if (writes) {
    for (auto& [other, use] : block.uses) check(other, use, "read");
    block.uses.clear();
    block.writer = current;
    block.write = {time, operation};
  }
  block.uses[current] = {time, operation};
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &Allocator::release, DEVICE};
    Guarded guard(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, limit == 0 || held + bytes <= limit, "pretend: out of memory. Tried to allocate ",
                     bytes, " bytes beside ", held, " of ", limit, ".");
    auto& waiting = freed[current];
    streams[current].join(host);
    for (auto& one : waiting) {
      TORCH_CHECK(streams[current].of(one.user) >= one.use.time, "pretend: an allocation on stream ", current,
                  " may get memory that ", one.use.operation, " on stream ", one.user,
                  " still uses: it was freed without record_stream or a wait.");
    }
    waiting.clear();
    char* memory = static_cast<char*>(std::malloc(bytes));
    std::memset(memory, 0xFF, bytes);  // NaN: what is not written is seen
    Block block;
    block.bytes = bytes;
    block.owner = block.writer = current;
    blocks.emplace(memory, std::move(block));
    held += bytes;
    return {memory, memory, &Allocator::release, DEVICE};
  }

  static void release(void* memory) {
    if (memory == nullptr) return;
    Guarded guard(lock);
    auto found = blocks.find(static_cast<char*>(memory));
    Block& block = found->second;
    block.uses.emplace(block.writer, block.write);
    for (auto& [user, use] : block.uses) {
      if (user != block.owner && !block.recorded.count(user)) freed[block.owner].push_back({user, use});
    }
    held -= block.bytes;
    blocks.erase(found);
    std::free(memory);
  }

  at::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

// Pinned memory is that of the CPU, and known.
std::map<const char*, size_t> pinned;

bool is_pinned(const void* data) {
  Guarded guard(lock);
  auto* at = static_cast<const char*>(data);
  auto after = pinned.upper_bound(at);
  return after != pinned.begin() && at < std::prev(after)->first + std::prev(after)->second;
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    char* memory = bytes == 0 ? nullptr : static_cast<char*>(std::malloc(bytes));
    Guarded guard(lock);
    if (memory != nullptr) pinned[memory] = bytes;
    return {memory, memory, &PinnedAllocator::release, at::kCPU};
  }
  static void release(void* memory) {
    Guarded guard(lock);
    pinned.erase(static_cast<char*>(memory));
    std::free(memory);
  }
  at::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

}  // namespace
