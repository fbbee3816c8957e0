// The one table of what C++ reads of objects of Python: attributes that are read or set, and methods
// that are called. `word<"name">` compiles only for a name that is here, and `native.check` compares
// the table with the classes when the module is loaded.
#pragma once

#include <algorithm>
#include <string_view>

namespace tensorprobe {

struct Attributes {
  const char* of;  // a class, a module, or a dict
  std::string_view names;
};

inline constexpr Attributes ATTRIBUTES[] = {
    {"tensorprobe.follow.function_mode.CallMode", "_plan dispatch_depth"},
    {"tensorprobe.follow.module_hooks.ModuleCall", "call frame leaves module place"},
    {"tensorprobe.follow.module_hooks.ModuleHooks", "around paths place thread"},
    {"tensorprobe.follow.module_hooks.ModulePaths", "_paths"},
    {"tensorprobe.follow.module_hooks._Thread", "entries owners"},
    {"tensorprobe.follow.naming.ApiName", "op"},
    {"tensorprobe.follow.naming.CallNames", "wanted"},
    {"tensorprobe.follow.naming.Counter", "_by_api _counts _new next"},
    {"tensorprobe.follow.place.Place", "__dict__ frame module parent stack thread"},
    {"tensorprobe.follow.stacks.Stacks", "current tables"},
    {"tensorprobe.follow.stand_ins.StandIns", "at count_levels"},
    {"tensorprobe.record.backward.Backward", "hook incoming outgoing"},
    {"tensorprobe.record.backward.ModuleBackward", "incoming outgoing"},
    {"tensorprobe.record.backward.NodeBackward", "incoming outgoing"},
    {"tensorprobe.record.backward.NodeRun", "id keep"},
    {"tensorprobe.record.calls.OpenCall",
     "draws edges id inputs keep names notes stack step versions writes"},
    {"tensorprobe.record.making.MadeNotes", "of"},
    {"tensorprobe.record.module_calls.ModuleCalls", "_made leave"},
    {"tensorprobe.record.tape.Tape",
     "_end_failed _named _unfinished _record_functions_of begin counter end entered everything "
     "gap ids is_open only raised recording running select stack_number step"},
    {"tensorprobe.record.tensor_lines.TensorLines", "arguments encoded encoder"},
    {"tensorprobe.store.lines.CallLine",
     "args buffers id kwargs module name notes op parameters parent stack thread"},
    {"tensorprobe.store.lines.EndLine", "id notes outputs"},
    {"tensorprobe.store.writer.CaptureWriter",
     "_asleep _break_log _log_broken _log_lock _step _wake call end nbytes_written"},
    {"tensorprobe.store.writer._Step", "closed lines log_fd n_calls"},
    {"tensorprobe.tensors.finiteness.KernelFlags", "_limits _past _slots full parts submit_piece"},
    {"tensorprobe.tensors.launch.Flagger", "_forms flag"},
    {"tensorprobe.tensors.readback.Queue", "_filling acquire place release"},
    {"tensorprobe.tensors.readback.Bank",
     "digests_at meta_at rows_at streams tickets used_rows"},
    {"tensorprobe.overflow.backward_calls.BackwardCalls", "backward_trouble hook_for"},
    {"tensorprobe.overflow.device_calls.DeviceCalls", "new_route"},
    {"tensorprobe.overflow.every_call.OverflowObserver", "backward device made_later passed state"},
    {"tensorprobe.overflow.guard_state.GuardState",
     "closures is_late look look_every looks_later on pending program step stepping watcher"},
    {"tensorprobe.overflow.module_place.GuardedProgram", "counter place"},
    {"tensorprobe.overflow.module_place.GuardPlace", "here"},
    {"tensorprobe.overflow.pending_calls.PendingCalls",
     "_known _notes active flags_of hold_piecemeal inputs is_due"},
    {"tensorprobe.overflow.pending_calls._Storages", "spans versions"},
    {"tensorprobe.overflow.watch.OverflowWatch", "attention call_made trouble"},
    {"tensorprobe.torch_versions.COMPILER", "_is_compiling_flag is_compiling"},
    {"msgspec.StructMeta", "__struct_config__ __struct_fields__"},
    {"msgspec.structs.StructConfig", "tag tag_field"},
    {"_thread.RLock", "acquire release"},
    {"types.FrameType", "f_lasti f_locals"},
    {"torch.nn.Module", "_buffers _compiled_call_impl _modules _parameters training"},
    {"tensorprobe_native.Edges", "has_functions has_leaves listen"},
    {"tensorprobe_native.Regions", "only"},
};

// Whether any class of the table has a name.
constexpr bool is_declared(std::string_view name) {
  for (const Attributes& row : ATTRIBUTES) {
    size_t at = 0;
    while (at < row.names.size()) {
      const size_t end = std::min(row.names.find(' ', at), row.names.size());
      if (row.names.substr(at, end - at) == name) return true;
      at = end + 1;
    }
  }
  return false;
}

}  // namespace tensorprobe
