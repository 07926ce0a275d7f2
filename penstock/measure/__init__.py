"""MECHANISM: live Graph -> Profile, timed here or estimated from work; links between ranks."""

from penstock.measure.cache import Cache
from penstock.measure.estimate import estimate
from penstock.measure.identity import identity
from penstock.measure.ledger import address_of, addresses
from penstock.measure.links import measure_links
from penstock.measure.measure import measure
from penstock.measure.speed import measure_speed
from penstock.measure.subject import Subject

__all__ = [
    "Cache",
    "Subject",
    "address_of",
    "addresses",
    "estimate",
    "identity",
    "measure",
    "measure_links",
    "measure_speed",
]
