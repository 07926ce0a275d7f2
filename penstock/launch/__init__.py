"""Local processes joined by torch.distributed: launcher, per-rank status files, hang reports and restart policy.

launcher.py         `launch`: starts one process per rank and collects their results
worker.py           the process of one rank
serialization.py    values sent between the two
scratch.py          temporary directories, removed even if their owner is killed
devices.py          the device of each rank, and the mesh of all of them
process_state.py    whether a process is running, stopped or gone; children that die with their parent
status_file.py      the current activity of each rank, in a file that other processes read
peer_watcher.py     ends a rank whose peers have failed; explains errors of torch.distributed by their status
reports.py          the errors that users see: of one rank, of a hang, of a launch
uncaught.py         prints the uncaught error of a rank
agent.py            ends a rank when torchrun's agent is gone
stop_signal.py      SIGINT and SIGTERM end training after the current step
restart.py          whether a failed run is restarted
fault_injection.py  faults on purpose, to test all of this
"""

from penstock.launch.agent import exit_with_agent
from penstock.launch.devices import check_devices, group_device, num_cores, pipeline_mesh, use_local_device
from penstock.launch.fault_injection import ALLOW_VARIABLE, FaultInjector, parse_faults
from penstock.launch.launcher import launch
from penstock.launch.peer_watcher import PeerWatcher
from penstock.launch.process_state import GONE, host_id, kill_children_at_exit, process_state
from penstock.launch.reports import ErrorReport, explain_hang, one_line, text_of
from penstock.launch.restart import RankFailure, RestartController, RestartDecision, RestartPolicy
from penstock.launch.scratch import scratch_directory, shared_status_directory
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
