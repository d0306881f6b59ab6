// A device of torch in CPU memory, with the rules of an accelerator that a CPU does not have.
//
// Kernels are those of the CPU: a tensor of the device is given to them under another name. What the device adds
// are checks. Every operation belongs to a stream, and each stream, and the host, knows how far it has waited for
// the others (memory.h). Memory that another stream wrote is read only after a wait for that write, or the
// operation raises; so does one that mixes tensors of the device with those of the CPU. Reads of the host are
// reported, and memory can be made to run out. A copy to pinned memory that the host does not wait for arrives when
// the host waits, and no earlier.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "memory.h"

namespace {

// ---------------------------------------------------------------------------- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  static c10::Stream named(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return named(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return named(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return named(new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return named(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return named(std::exchange(current, stream.id())); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    report_wait("synchronize a stream");
    host_waits_for(up_to_now(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    report_wait("synchronize the device");
    Clock all;
    {
      Guarded guard(lock);
      for (auto& clock : streams) all.join(clock);
    }
    host_waits_for(all);
  }

  // An event is the clock of a stream.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Clock*>(*event);
    *event = new Clock(up_to_now(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Guarded guard(lock);
    if (event != nullptr) streams[stream.id()].join(*static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) host_waits_for(*static_cast<Clock*>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    report_wait("synchronize an event");
    queryEvent(event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Guarded guard(lock);
    auto found = blocks.find(static_cast<const char*>(data.get()));
    if (found != blocks.end()) found->second.recorded.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* own = storage.unsafeGetStorageImpl();
    if (bytes == own->nbytes()) return;
    auto data = allocator.allocate(bytes);
    if (size_t both = std::min(bytes, own->nbytes())) std::memcpy(data.get(), own->data(), both);
    own->set_data_ptr_noswap(std::move(data));
    own->set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------------------- tensors under another name

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// Returns a tensor of the CPU in the memory of a tensor of the device, which it keeps alive.
at::Tensor as_cpu(const at::Tensor& tensor) {
  const c10::Storage& own = tensor.storage();
  c10::DataPtr data(
      own.mutable_data(), new c10::Storage(own), [](void* kept) { delete static_cast<c10::Storage*>(kept); }, at::kCPU);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), own.nbytes(),
                                                             std::move(data), c10::GetCPUAllocator(), true));
  return tensor_on(std::move(storage), c10::DispatchKey::CPU, tensor, tensor.storage_offset());
}

// The arguments of one operation: tensors of the device under their names on the CPU.
struct Renamed {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // of the device, on the CPU
  std::vector<at::Tensor> foreign;                       // of the CPU, and not a number

  at::Tensor tensor(const at::Tensor& given) {
    if (!given.defined()) return given;
    if (!given.device().is_privateuseone()) {
      if (given.dim() > 0 && given.device().is_cpu()) foreign.push_back(given);
      return given;
    }
    pairs.emplace_back(given, as_cpu(given));
    return pairs.back().second;
  }

  c10::IValue value(const c10::IValue& given) {
    if (given.isTensor()) return tensor(given.toTensor());
    if (given.isDevice() && given.toDevice().is_privateuseone()) return c10::Device(at::kCPU);
    if (!given.isList() || given.isIntList() || given.isDoubleList() || given.isBoolList()) return given;
    auto items = given.toList();
    c10::impl::GenericList renamed(items.elementType());
    for (const c10::IValue& item : items) renamed.push_back(value(item));
    return renamed;
  }

  // Returns a result as a tensor of the device: an argument, a view of one, or new memory.
  at::Tensor back(const at::Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& [own, renamed] : pairs) {
      if (result.is_same(renamed)) return own;
    }
    for (auto& [own, renamed] : pairs) {
      if (result.storage().is_alias_of(renamed.storage()))
        return tensor_on(own.storage(), c10::DispatchKey::PrivateUse1, result, result.storage_offset());
    }
    at::Tensor made = at::detail::empty_strided_generic(result.sizes(), result.strides(), &allocator,
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                  result.scalar_type());
    as_cpu(made).copy_(result);
    return made;
  }

  c10::IValue back(const c10::IValue& result) const {
    if (result.isTensor()) return back(result.toTensor());
    if (!result.isList()) return result;
    auto items = result.toList();
    c10::impl::GenericList own(items.elementType());
    for (const c10::IValue& item : items) own.push_back(back(item));
    return own;
  }

  // Gives a tensor of the device the size that a kernel gave its name on the CPU.
  void resize() const {
    for (auto& [own, renamed] : pairs) {
      if (own.sizes() == renamed.sizes() && own.strides() == renamed.strides()) continue;
      if (own.numel() != renamed.numel() || base_of(own) != base_of(renamed)) {
        at::native::resize_(own, renamed.sizes());
        as_cpu(own).copy_(renamed);
      } else {
        own.unsafeGetTensorImpl()->set_sizes_and_strides(renamed.sizes(), renamed.strides());
      }
    }
  }
};

// ---------------------------------------------------------------------------- operations

const std::set<std::string> READ_BY_THE_HOST = {"aten::equal",       "aten::nonzero",    "aten::masked_select",
                                                "aten::_unique2",    "aten::unique_dim", "aten::unique_consecutive",
                                                "aten::is_set_to",   "aten::_local_scalar_dense",
                                                "aten::repeat_interleave"};

bool has_mask(const Renamed& renamed) {
  return std::any_of(renamed.pairs.begin(), renamed.pairs.end(),
                     [](auto& pair) { return pair.first.scalar_type() == at::kBool; });
}

// Runs any operation with the kernel of the CPU.
void by_the_cpu(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const bool is_view = !schema.returns().empty() && schema.returns()[0].alias_info() != nullptr &&
                       !schema.returns()[0].alias_info()->isWrite();
  Renamed renamed;
  std::vector<std::pair<at::Tensor, bool>> accessed;
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const size_t before = renamed.pairs.size();
    (*stack)[begin + i] = renamed.value((*stack)[begin + i]);
    for (size_t j = before; j < renamed.pairs.size(); ++j)
      accessed.emplace_back(renamed.pairs[j].first, alias != nullptr && alias->isWrite());
  }
  TORCH_CHECK(renamed.foreign.empty() || renamed.pairs.empty(), "pretend: ", name,
              " is given tensors on the device and a tensor of shape ",
              renamed.foreign.empty() ? c10::IntArrayRef() : renamed.foreign[0].sizes(), " on the CPU.");
  uint64_t time = 0;
  {
    Guarded guard(lock);
    time = advance(current);
    if (!is_view)
      for (auto& [tensor, writes] : accessed) access(tensor, writes, time, name);
  }
  if (READ_BY_THE_HOST.count(name) || (name.rfind("aten::index", 0) == 0 && has_mask(renamed))) {
    report_wait(name);
    host_waits_for(up_to_now(current));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  renamed.resize();
  const auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    c10::IValue& result = (*stack)[stack->size() - returns.size() + i];
    result = renamed.back(result);
    if (returns[i].alias_info() == nullptr && result.isTensor() && result.toTensor().defined()) {
      Guarded guard(lock);
      access(result.toTensor(), true, time, name);
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

// Copies between the host and the device, or on the device.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const bool is_read = from.device().is_privateuseone(), is_written = to.device().is_privateuseone();
  const at::Tensor source = is_read ? as_cpu(from) : from, target = is_written ? as_cpu(to) : to;
  const bool waits = is_read && is_written ? false : !non_blocking || (is_read && !is_pinned(to.storage().data()));
  arrive(up_to_now(current));
  {
    Guarded guard(lock);
    const uint64_t time = advance(current);
    if (is_read) access(from, false, time, "copy_");
    if (is_written) access(to, true, time, "copy_");
    if (!is_written && !waits) {
      arriving.push_back({current, time, [target, values = source.clone()] {
                            at::NoGradGuard no_grad;
                            target.copy_(values);
                          }});
      return to;
    }
  }
  if (waits) {
    report_wait(is_read ? "copy to the host" : "copy to the device");
    host_waits_for(up_to_now(current));
  }
  at::Tensor(target).copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_number(const at::Tensor& self) {
  {
    Guarded guard(lock);
    access(self, false, advance(current), "item");
  }
  report_wait("item");
  host_waits_for(up_to_now(current));
  return as_cpu(self).item();
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  const c10::SymInt size(static_cast<int64_t>(source.nbytes() / self.element_size())), one(1);
  return set_storage(self, std::move(source), 0, size, one);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

void copy_each(at::TensorList self, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < self.size(); ++i) at::Tensor(self[i]).copy_(from[i], non_blocking);
}

// ---------------------------------------------------------------------------- collectives

// A collective of gloo that the streams of the device may wait for.
struct Collective final : c10d::Work {
  Collective(c10::intrusive_ptr<c10d::Work> work, Clock done, c10::IValue result)
      : work(std::move(work)), done(std::move(done)), value(std::move(result)) {}

  bool isCompleted() override { return work->isCompleted(); }
  bool isSuccess() const override { return work->isSuccess(); }
  std::exception_ptr exception() const override { return work->exception(); }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { work->abort(); }
  bool wait(std::chrono::milliseconds timeout) override {
    {
      Guarded guard(lock);
      streams[current].join(done);
    }
    return work->wait(timeout);
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{DEVICE});
    future->markCompleted(value);
    return future;
  }

  c10::intrusive_ptr<c10d::Work> work;
  Clock done;
  c10::IValue value;
};

// Each process group has a stream, as NCCL's have.
StreamId stream_of(const void* group) {
  Guarded guard(lock);
  auto found = of_groups.find(group);
  return found != of_groups.end() ? found->second : of_groups[group] = new_stream();
}

void by_gloo(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  Renamed renamed;
  std::vector<std::pair<at::Tensor, bool>> accessed;
  const void* group = nullptr;
  std::vector<at::Tensor> first;  // what a future of the collective holds
  for (size_t i = 0; i < count; ++i) {
    const std::string& argument = schema.arguments()[i].name();
    const bool writes = argument.rfind("input", 0) != 0 && schema.name() != "c10d::send";
    const size_t before = renamed.pairs.size();
    c10::IValue& value = (*stack)[begin + i];
    if (argument == "process_group") group = value.toCustomClass<c10d::ProcessGroup>().get();
    value = renamed.value(value);
    for (size_t j = before; j < renamed.pairs.size(); ++j) {
      accessed.emplace_back(renamed.pairs[j].first, writes);
      if (i == 0) first.push_back(renamed.pairs[j].first);
    }
  }
  TORCH_CHECK(renamed.foreign.empty(), "pretend: ", schema.name(), " is given tensors on the device and on the CPU.");
  const StreamId stream = stream_of(group);
  {
    Guarded guard(lock);
    streams[stream].join(up_to_now(current));
    const StreamId before = std::exchange(current, stream);
    const uint64_t time = advance(stream);
    for (auto& [tensor, writes] : accessed) access(tensor, writes, time, schema.name());
    current = before;
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } catch (...) {  // refused, and nothing is under way
    const Clock now = up_to_now(stream);
    Guarded guard(lock);
    streams[current].join(now);
    throw;
  }
  for (size_t i = stack->size() - schema.returns().size(); i + 1 < stack->size(); ++i)
    (*stack)[i] = renamed.back((*stack)[i]);
  auto work = stack->back().toCustomClass<c10d::Work>();
  if (work)
    stack->back() = c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<Collective>(work, up_to_now(stream), c10::IValue(first)));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_number);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("record_stream", record_stream);
  library.impl("_foreach_copy_", copy_each);
}

// ---------------------------------------------------------------------------- autocast

// Gives an operation what it computes in under autocast.
template <bool NARROW>
void cast(const c10::OperatorHandle& op, c10::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto type = NARROW ? at::autocast::get_autocast_dtype(KIND) : at::kFloat;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) value = at::autocast::cached_cast(type, value.toTensor(), KIND);
  }
  op.callBoxed(stack);
}

// The lists are those of a GPU, and not those of the CPU, which computes norms in the narrow type.
void register_autocast() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  const auto each = [](std::initializer_list<const char*> names, auto kernel) {
    for (std::string name : names) {
      const size_t overload = name.find(", ");
      if (overload != std::string::npos) name.replace(overload, 2, ".");
      library.impl(name.c_str(), kernel());
    }
  };
#define NAMED(...) #__VA_ARGS__,
  each({AT_FORALL_LOWER_PRECISION_FP(NAMED)}, [] { return torch::CppFunction::makeFromBoxedFunction<&cast<true>>(); });
  each({AT_FORALL_FP32(NAMED) AT_FORALL_FP32_SET_OPT_DTYPE(NAMED)},
       [] { return torch::CppFunction::makeFromBoxedFunction<&cast<false>>(); });
#undef NAMED
}

// torch registers kernels of its own for the collectives of such a device, and warns that these replace them.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void register_collectives() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name : {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
                           "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                           "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_",
                           "scatter_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_gloo>());
}

}  // namespace

PYBIND11_MODULE(pretend, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  register_collectives();
  register_autocast();
  // Operators without a derivative, which those of FSDP2 and of c10d are, and those that autocast leaves as they are.
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::AutocastPrivateUse1}) {
    if (!dispatcher.hasBackendFallbackForDispatchKey(key))
      kept.push_back(dispatcher.registerFallback(key, c10::KernelFunction::makeFallthrough(), "pretend"));
  }
  module.def("set_limit", [](size_t bytes) { limit = bytes; });
  module.def("held", [] { return held; });
  module.def("on_wait", [](pybind11::object call) {
    Py_XDECREF(on_wait);
    on_wait = call.is_none() ? nullptr : call.release().ptr();
  });
}
