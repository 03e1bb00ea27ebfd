"""Small transfers; on a CPU they are the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from paceline.engine import transfers

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_moves() -> None:
    tensor = torch.arange(4)
    assert transfers.to_device(tensor, CPU) is tensor
    assert transfers.HostCopy(tensor).wait() is tensor
    target = torch.zeros(4, dtype=torch.int64)
    transfers.write_to(target, tensor)
    assert target.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_on_a_gpu_a_copy_is_what_was_queued_when_it_was_made() -> None:
    device = torch.device("cuda")
    sent = [transfers.to_device(torch.full((1000,), index), device) for index in range(200)]
    held = sent[0].clone()
    copies = []
    for tensor in sent:
        held.copy_(tensor)
        copies.append(transfers.HostCopy(held))
    assert [int(copy.wait().unique()) for copy in copies] == list(range(200))


@pytest.mark.gpu
def test_on_a_gpu_what_is_written_may_be_given_up_at_once() -> None:
    target = torch.zeros(1000, dtype=torch.int64, device="cuda")
    torch.cuda._sleep(20_000_000)
    copies = []
    for index in range(200):
        transfers.write_to(target, torch.full((1000,), index))
        copies.append(transfers.HostCopy(target))
    assert [int(copy.wait().unique()) for copy in copies] == list(range(200))


@pytest.mark.gpu
def test_on_a_gpu_neither_direction_waits_for_the_device() -> None:
    device = torch.device("cuda")
    busy = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    busy.record()
    copy = transfers.HostCopy(transfers.to_device(torch.arange(8), device) * 2)
    assert not busy.query()
    assert copy.wait().tolist() == list(range(0, 16, 2))
