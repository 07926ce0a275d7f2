"""Local processes joined by torch.distributed: launcher, per-rank status files, hang reports and restart policy."""

from penstock.launch.agent import exit_with_agent
from penstock.launch.devices import check_devices, num_cores, pipeline_mesh, use_local_device
from penstock.launch.fault_injection import ALLOW_VARIABLE, FaultInjector, parse_faults
from penstock.launch.launcher import launch
from penstock.launch.peer_watcher import PeerWatcher
from penstock.launch.process_state import GONE, host_id, kill_children_at_exit, process_state
from penstock.launch.reports import ErrorReport, explain_hang, one_line, text_of
from penstock.launch.restart import RankFailure, RestartController, RestartDecision, RestartPolicy
from penstock.launch.scratch import group_device, scratch_directory, shared_status_directory
from penstock.launch.status_file import (
    MAX_FAILURE_BYTES,
    STATUS_DIR_VARIABLE,
    RankStatus,
    StatusEntry,
    StatusFile,
    sync_point_code,
)
from penstock.launch.stop_signal import StopRequest, catch_stop_signals, forward_stop_signals
from penstock.launch.uncaught import ErrorPrinter
from penstock.launch.worker import run_before_exit
