"""Presets of devices and links."""

import pytest

from penstock.errors import CostError
from penstock.ir import DEVICES, LINKS, DeviceSpeed, find_link, from_json, node_cluster, to_json


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_achieves_less_than_its_datasheet(name):
    device, speed = DEVICES[name], DeviceSpeed.named(name)
    assert 0.5 * device.half < dict(speed.rates)["bfloat16"] < device.half
    assert speed.flops_per_second < device.single < device.half
    assert speed.bytes_per_second < device.bandwidth
    assert device.within in LINKS
    assert device.across in LINKS
    assert str(speed).startswith(f"{name}: ")
    assert from_json(to_json(speed)) == speed


def test_seconds_go_by_the_rate_of_the_dtype():
    speed = DeviceSpeed(1e12, 1e12, rates=(("bfloat16", 4e12),))
    assert speed.seconds(8e12, 0.0, "bfloat16") == 2.0
    assert speed.seconds(8e12, 0.0, "float32") == speed.seconds(8e12, 0.0) == 8.0
    assert speed.seconds(8e12, 3e12, "bfloat16") == 3.0


def test_links_inside_and_between_nodes():
    cluster = node_cluster(10, "nvlink", "400G", per_node=4)
    assert cluster.link(0, 3).bandwidth == LINKS["nvlink4"].bandwidth
    assert cluster.link(3, 4).bandwidth == cluster.link(0, 9).bandwidth == LINKS["400G"].bandwidth
    assert cluster.link(8, 9).latency == LINKS["nvlink4"].latency
    assert node_cluster(4, "pcie", "100G").links == ()
    assert node_cluster(16, "pcie").bandwidth == find_link("PCIe").bandwidth


def test_unknown_names():
    with pytest.raises(CostError, match="did you mean h100"):
        DeviceSpeed.named("h1000")
    with pytest.raises(CostError, match="unknown link"):
        node_cluster(2, "string")
    with pytest.raises(CostError, match="per_node must be 1 or more"):
        node_cluster(2, "pcie", per_node=0)
    with pytest.raises(CostError, match="rates must be finite numbers above 0"):
        DeviceSpeed(1.0, 1.0, rates=(("float16", 0.0),))
