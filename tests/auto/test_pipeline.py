"""An AutoPipeline on one rank: its steps, the description of its stages, and its drawing."""

import logging
import unittest

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock import AutoPipeline, AutoPipelineConfig, PenstockError, PipelineInfo
from tests.auto.models import SAMPLES, VOCABULARY, batches, decoder, mean_loss

((IDS, LABELS),) = batches(1)


def small(kind="Llama", **changes):
    return decoder(kind, layers=2, **changes)


def built(mesh, model, loss_fn=mean_loss, **settings):
    fields = {"pp_batch_size": SAMPLES, "pp_schedule": "interleaved1f1b", **settings}
    return AutoPipeline(AutoPipelineConfig(mesh, **fields)).build(model, loss_fn=loss_fn)


def gradients_of_a_loop(model, divisor=1.0):
    """What backward leaves of one microbatch after the other, and their losses."""
    losses = [mean_loss(model(ids[None]).logits, labels[None]) for ids, labels in zip(IDS, LABELS, strict=True)]
    (sum(losses) / divisor).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found, [loss.item() for loss in losses]


def assert_gradients(model, expected, times=1):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, times * expected[name], rtol=1e-10, atol=1e-14)


def test_a_step_leaves_the_sum_over_the_microbatches_and_fills_the_losses(mesh):
    model = small()
    expected, each = gradients_of_a_loop(model)
    losses = ["what was there before"]
    built(mesh, model).step(IDS, target=LABELS, losses=losses)
    assert_gradients(model, expected)
    assert [loss.item() for loss in losses] == pytest.approx(each, rel=1e-12)


@pytest.mark.parametrize("kind", ["Cohere", "Gemma2", "Granite", "Phi"])
def test_models_whose_own_forward_does_more_than_call_layers_keep_it(mesh, kind):
    more = {
        "Cohere": {"logit_scale": 3.0},
        "Gemma2": {"final_logit_softcapping": 0.5},
        "Granite": {"logits_scaling": 4.0},
    }
    model = small(kind, **more.get(kind, {}))
    expected, each = gradients_of_a_loop(model)
    losses = []
    built(mesh, model).step(IDS, target=LABELS, losses=losses)
    assert_gradients(model, expected)
    assert [loss.item() for loss in losses] == pytest.approx(each, rel=1e-12)


def test_scaled_gradients_are_the_mean_also_when_steps_accumulate(mesh):
    model = small()
    expected, each = gradients_of_a_loop(model, divisor=SAMPLES)
    ap, losses = built(mesh, model, scale_grads_in_schedule=True), []
    for _ in range(2):
        ap.info.schedule.step(IDS, target=LABELS, losses=losses)
    assert_gradients(model, expected, times=2)
    assert [loss.item() for loss in losses] == pytest.approx(each, rel=1e-12)


def test_gradients_are_divided_and_clipped(mesh):
    model = small()
    expected, _ = gradients_of_a_loop(model, divisor=8)
    ap = built(mesh, model)
    ap.step(IDS, target=LABELS)
    ap.scale_grads_by_divisor(divisor=8)
    assert_gradients(model, expected)
    norm = torch.linalg.vector_norm(torch.cat([one.flatten() for one in expected.values()]))
    assert ap.clip_grad_norm(max_norm=0.01).item() == pytest.approx(norm.item(), rel=1e-10)
    assert ap.clip_grad_norm(max_norm=1.0).item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("divisor", [0, float("nan"), "8", None])
def test_a_divisor_that_is_none_is_refused(mesh, divisor):
    with pytest.raises(PenstockError, match="divisor must be"):
        built(mesh, small()).scale_grads_by_divisor(divisor)


def test_eval_gives_losses_and_logits_and_leaves_no_gradients(mesh):
    model, losses = small(), []
    found = built(mesh, model).eval(IDS, target=LABELS, losses=losses, return_outputs=True)
    with torch.no_grad():
        torch.testing.assert_close(found.outputs, model(IDS).logits)
    assert len(losses) == SAMPLES
    assert all(parameter.grad is None for parameter in model.parameters())


def test_steps_may_bring_masks_and_other_lengths(mesh):
    model, losses = small("Mistral", sliding_window=3), []
    ap = built(mesh, model)
    ap.step(IDS, target=LABELS)
    ((ids, labels),) = batches(1, length=11)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    ap.step(ids, target=labels, losses=losses, attention_mask=mask)
    rows = zip(ids[:, None], mask[:, None], labels[:, None], strict=True)
    whole = [mean_loss(model(row, attention_mask=seen).logits, wanted) for row, seen, wanted in rows]
    assert torch.stack(losses).tolist() == pytest.approx(torch.stack(whole).tolist(), rel=1e-12)


def test_a_model_may_return_its_loss_itself(mesh):
    model, losses = small(), []
    built(mesh, model, loss_fn=None).step(IDS, labels=IDS, losses=losses)
    expected = [model(ids[None], labels=ids[None]).loss.item() for ids in IDS]
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("is_patched", [True, False])
def test_the_loss_function_gets_logits_or_all_that_the_model_returns(mesh, is_patched):
    seen = set()

    def loss_fn(output, target):
        seen.add(type(output).__name__)
        return mean_loss(output if is_patched else output.logits, target)

    built(mesh, small(), loss_fn, patch_causal_lm_model=is_patched).step(IDS, target=LABELS)
    assert seen == ({"Tensor"} if is_patched else {"CausalLMOutputWithPast"})


def test_an_inner_model_that_is_not_patched_caches_as_configured(mesh):
    assert built(mesh, small(use_cache=False), patch_inner_model=False).eval(IDS, return_outputs=True).outputs.ndim == 3
    caching = built(mesh, small(use_cache=True), patch_inner_model=False)
    assert caching.eval(IDS, return_outputs=True).outputs.ndim == 3


def test_the_model_gets_the_type_and_the_device_that_are_asked_for(mesh):
    ap = built(mesh, small(), dtype=torch.float32, device="cpu")
    assert {parameter.dtype for parameter in ap.parameters()} == {torch.float32}


def test_a_model_of_the_user_is_built_with_an_example(mesh):
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), torch.randn(4, 3)
    config = AutoPipelineConfig(mesh, pp_batch_size=4, layers_per_stage=1, pp_schedule="loopedbfs")
    ap = AutoPipeline(config).build(model, loss_fn=functional.mse_loss, args=(x,))
    ap.step(x, target=x)
    assert [stage.stage_index for stage in ap.info.stages] == [0, 1, 2, 3]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_parallelize_fn_is_called_once_for_every_part_with_all_axes(mesh):
    calls = []

    def parallelize(model, world_mesh, moe_mesh, **axes):
        calls.append((model, world_mesh is mesh, moe_mesh is mesh, axes))

    config = AutoPipelineConfig(mesh, moe_mesh=mesh, ep_axis_name="pp", pp_schedule="interleaved1f1b")
    ap = AutoPipeline(config).build(small(), loss_fn=mean_loss, parallelize_fn=parallelize)
    axes = {"pp_enabled": True, "dp_axis_names": (), "cp_axis_name": None, "tp_axis_name": None}
    experts = {"ep_axis_name": "pp", "ep_shard_axis_names": None}
    assert calls == [(part, True, True, axes | experts) for part in ap.parts]


def test_a_parallelize_fn_that_returns_another_module_is_refused(mesh):
    config = AutoPipelineConfig(mesh)
    with pytest.raises(PenstockError, match="must change the stage in place"):
        AutoPipeline(config).build(small(), loss_fn=mean_loss, parallelize_fn=lambda *_, **__: nn.Linear(1, 1))


# ------------------------------------------------------------------------------------------------- descriptions


@pytest.fixture(scope="module")
def ap(mesh):
    model = decoder(tie_word_embeddings=True)
    model.model.norm.requires_grad_(False)
    return built(mesh, model)


def test_parameters_are_counted_for_each_stage_and_tied_ones_once_in_all(ap):
    model, width = ap.pipeline, 8
    first, last = ap.get_stage_param_counts()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert first + last == total + VOCABULARY * width
    assert ap.get_total_param_count() == total
    assert ap.get_total_param_count(trainable_only=True) == total - width
    assert ap.get_stage_param_counts(trainable_only=True) == [first, last - width]


def test_modules_are_listed_by_the_names_of_the_model(ap):
    first, last = ap.list_stage_modules()
    assert {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.rotary_emb"} <= set(first)
    assert {"model.layers.2", "model.layers.3", "model.norm", "lm_head", "model.rotary_emb"} <= set(last)


def test_stages_are_printed_with_their_places_and_first_modules(ap):
    lines = ap.pretty_print_stages(max_modules_per_stage=2).splitlines()
    assert lines[0].startswith("stage 0 of 2 (first): ")
    assert lines[1:3] == ["  model", "  model.embed_tokens"]
    assert lines[3].startswith("  and ")
    assert lines[4].startswith("stage 1 of 2 (last): ")


def test_the_summary_has_schedule_stages_microbatches_and_parameters(ap):
    lines = ap.debug_summary().splitlines()
    count = f"{ap.get_total_param_count():,}"
    trained = f"{ap.get_total_param_count(trainable_only=True):,}"
    assert lines == [
        "schedule: interleaved",
        "ranks: 1",
        "stages: 2, on ranks 0, 0",
        "microbatches: 4",
        "stages here: 0, 1",
        f"parameters here: {count}, of which {trained} are trained",
    ]


def test_the_summary_is_logged_with_the_stages(ap):
    with unittest.TestCase().assertLogs("penstock.auto.pipeline", logging.INFO) as logs:
        ap.log_debug_summary()
    (record,) = logs.records
    assert record.getMessage() == f"{ap.debug_summary()}\n{ap.pretty_print_stages()}"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("html", b"<!DOCTYPE html>")])
def test_the_schedule_is_drawn_in_the_format_of_the_file(ap, tmp_path, suffix, start):
    path = tmp_path / f"schedule.{suffix}"
    ap.visualize_current_schedule(str(path))
    assert start in path.read_bytes()[:200]
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["schedule.gif", "missing/schedule.svg"])
def test_a_picture_that_cannot_be_drawn_or_written_is_refused(ap, tmp_path, name):
    with pytest.raises(PenstockError, match="picture"):
        ap.visualize_current_schedule(tmp_path / name)


def test_a_page_escapes_the_name_of_a_file(ap, tmp_path):
    from penstock.auto.pipeline import draw_schedule

    draw_schedule(ap.info.schedule.order, "<script>.csv", tmp_path / "page.html")
    assert "&lt;script&gt;.csv" in (tmp_path / "page.html").read_text()
    assert "<script>" not in (tmp_path / "page.html").read_text()


def test_before_it_is_built_there_is_nothing_to_look_at_or_to_train(mesh):
    bare = AutoPipeline(AutoPipelineConfig(mesh))
    assert bare.info == PipelineInfo(False, None, False, False, None, None)
    for use in (lambda: bare.parts, bare.debug_summary, bare.pretty_print_stages, lambda: bare.step(IDS)):
        with pytest.raises(PenstockError, match=r"build\(\) must be called first"):
            use()


def test_losses_that_cannot_be_filled_are_refused(ap):
    with pytest.raises(PenstockError, match="losses must be a list"):
        ap.step(IDS, target=LABELS, losses=())
