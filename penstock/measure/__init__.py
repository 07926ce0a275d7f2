"""Profiles of captured models, measured here or estimated for a device, and links between ranks.

MeasuredModel --> measure (timed, calibrated to the unsplit model) or estimate (from arithmetic and bytes) --> Profile
"""

from penstock.measure.cache import Cache
from penstock.measure.identity import identity
from penstock.measure.links import measure_links
from penstock.measure.measured_model import MeasuredModel
from penstock.measure.memory import AllocationTracker
from penstock.measure.profiler import estimate, measure
from penstock.measure.timing import device_name, measure_speed
