"""Captured: a model, its graph, and one recording for every form of batch met so far."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from penstock.capture.book import home_of
from penstock.capture.conditions import Conditions
from penstock.capture.form import batch_form, model_form
from penstock.capture.kept import without_parameter_hooks
from penstock.capture.leaves import Granularity
from penstock.capture.mistakes import check_apart, check_batch, check_granularity, check_mode, check_model
from penstock.capture.recording import Recording, make_recording
from penstock.capture.replay import Replay, Values, Wrap, output_of
from penstock.capture.surroundings import undisturbed
from penstock.errors import CaptureError
from penstock.ir import Graph, leaf_names, leaves, named_inputs, signature_of, transform

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Captured:
    """A model that can be played call by call; `graph` is that of the example batch."""

    def __init__(
        self, model: nn.Module, granularity: Granularity, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.model = model
        self.example = (args, kwargs)
        self._granularity = granularity
        self._recordings: dict[tuple[Any, ...], list[Recording]] = {}
        self._conditions: dict[int, Conditions] = {}
        self._first: Recording | None = None
        self._planned: Graph | None = None
        self.surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
        """what is entered around every recording, such as gathering parameters that are sharded"""

    @classmethod
    def planned(cls, model: nn.Module, graph: Graph) -> "Captured":
        """A model that was captured elsewhere: its graph is known, and it is recorded when the first batch comes."""
        captured = cls(model, Granularity.of(graph), (), {})
        captured._planned = graph
        return captured

    @property
    def first(self) -> Recording:
        """The recording of the example batch."""
        assert self._first is not None
        return self._first

    @property
    def graph(self) -> Graph:
        """The graph of the example batch."""
        return self._planned or self.first.graph

    @property
    def is_meta(self) -> bool:
        """Whether the model has no numbers."""
        return home_of(self.model).type == "meta"

    @property
    def recorded_example(self) -> Batch:
        """The example as the model is called with it."""
        args, kwargs = self.example
        return args, without_cache(self.model, kwargs)

    def other_batch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example with its samples in another order, if the record holds for that; else the example."""
        other = transform(self.example, _rolled_rows if self._has_rows() else _rolled_last)
        try:
            found = self.recording(*other)
        except CaptureError:
            return self.example
        return other if found is self._first else self.example

    def _has_rows(self) -> bool:
        """Whether the example has more than one sample."""
        return any(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1 for leaf in leaves(self.example))

    @property
    def num_recordings(self) -> int:
        """How many forms of batches have been recorded."""
        return sum(map(len, self._recordings.values()))

    def recording(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """The recording that holds for this batch; made now if there is none."""
        return self.met([(args, kwargs)])[0][0]

    def met(self, batches: Iterable[Batch]) -> list[tuple[Recording, Values]]:
        """For batches that are met at once the recording of each, made now if there is none, and its tensors by name.

        The model is looked at once for all of them.
        """
        signature, own = signature_of(self.model.forward), self._form()
        found: list[tuple[Recording, Values]] = []
        known: dict[Any, list[Recording]] = {}
        for args, kwargs in batches:
            kwargs = without_cache(self.model, kwargs)
            given = named_inputs(self.model.forward, args, kwargs, signature)
            inputs = {name: leaf for name, leaf in given.items() if isinstance(leaf, Tensor)}
            form = batch_form(given)
            if form not in known:
                known[form] = self._recordings.get((form, own), [])
            recording = next((one for one in known[form] if self._holds(one, inputs)), None)
            if recording is None:
                recording = self._made(form, args, kwargs)
                own, known = self._form(), {}
            if recording.written_inputs:
                check_apart(inputs, recording.written_inputs)
            found.append((recording, inputs))
        return found

    def _form(self, *more: Recording) -> Any:
        """The form of the model now, for all recordings that there are and some more."""
        volatile = [one.traits.volatile for known in (*self._recordings.values(), more) for one in known]
        return model_form(self.model, self._granularity, frozenset[str]().union(*volatile))

    def _made(self, form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        check_mode()
        with self.surroundings():
            made = make_recording(self.model, args, kwargs, self._granularity)
        self._first = self._first or made
        # Leaves that had to be opened are open from now on, also in what tells forms apart.
        self._granularity = made.granularity
        self._recordings.setdefault((form, self._form(made)), []).append(made)
        return made

    def _holds(self, recording: Recording, inputs: Values) -> bool:
        """Whether all that the record read from the inputs reads the same in this batch."""
        if id(recording) not in self._conditions:
            self._conditions[id(recording)] = Conditions(recording, self.model)
        conditions = self._conditions[id(recording)]
        # Without numbers there is nothing to decide by.
        return conditions.are_trivial or self.is_meta or conditions.hold(inputs)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        """The tensors of a batch by the names of the graph's inputs."""
        found = named_inputs(self.model.forward, args, without_cache(self.model, kwargs))
        return {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}

    def replay(
        self,
        recording: Recording,
        nodes: Collection[str],
        modules: nn.Module,
        wanted: Collection[str],
        wrap: Wrap | None = None,
    ) -> Replay:
        """Some calls of a recording, prepared to run on modules that have the same names; `wrap` may replace them."""
        return Replay(recording, nodes, modules, wanted, self.model, wrap)

    def leaf_modules(self, nodes: Iterable[str], recording: Recording | None = None) -> list[str]:
        """The modules that some nodes, of the example or of another recording, are calls of."""
        graph = recording.graph if recording else self.graph
        return [graph[name].module for name in nodes if graph[name].is_leaf]

    def unused_leaves(self) -> list[str]:
        """The modules that would be leaves and that the example never called."""
        called = {node.module for node in self.graph.nodes if node.is_leaf}
        return [name for name in self._granularity.leaves(self.model) if name not in called]

    def output_names(self, recording: Recording) -> tuple[str, ...]:
        """The values among the leaves of what the model returns, in their order; "" for a parameter or buffer."""
        return leaf_names(recording.record.outputs)

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """The unsplit model, called as it is recorded."""
        return self.model(*args, **without_cache(self.model, kwargs))

    @contextmanager
    def undisturbed(self, seed: int | None = None, written: Collection[str] | None = None) -> Iterator[None]:
        """Whatever happens inside, the model's surroundings are left as they were.

        `written` names the parameters that are written inside, if that is known.
        """
        with undisturbed(self.model, seed, written):
            yield

    def without_parameter_hooks(self) -> AbstractContextManager[None]:
        """Inside, gradients reach the parameters and no hook of the user's on them runs."""
        return without_parameter_hooks(self.model)

    def output(self, recording: Recording, values: Values) -> Any:
        """What the model returns, from the values that it mentions."""
        return output_of(recording, values, self.model)


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | None = None,
    basic_blocks: Sequence[str | type] = (),
) -> Captured:
    """Record the model on one example batch. The model is left exactly as it was."""
    check_model(model)
    check_batch(args, kwargs)
    check_granularity(depth, basic_blocks)
    captured = Captured(model, Granularity(depth, tuple(basic_blocks)), tuple(args), dict(kwargs or {}))
    captured.recording(*captured.example)
    return captured


def without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face models keep keys and values for generation unless told not to; training has no use for them."""
    config = getattr(model, "config", None)
    # Models of several kinds of data have a configuration inside for that of text.
    configs = (config, *getattr(config, "__dict__", {}).values())
    if not any(getattr(one, "use_cache", False) is True for one in configs) or kwargs.get("use_cache") is not None:
        return kwargs
    accepts = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepts.values())
    return {**kwargs, "use_cache": False} if takes_any or "use_cache" in accepts else kwargs


def _rolled_rows(leaf: object) -> object:
    return leaf.roll(1, 0) if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _rolled_last(leaf: object) -> object:
    """A sample that is the only one is turned within itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    last = [dim for dim in range(leaf.dim()) if leaf.shape[dim] > 1][-1:]
    return leaf.roll(1, last[0]) if last else leaf
