"""The places that a `where` matches: text, objects, types, expressions, predicates, pairs, and lists of these."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._kernel import find_places
from tests.errors.wording import says
from tests.support.models import GPT, Block, Nested, mlp, tokens


def names(model: nn.Module, *where: Any) -> list[str]:
    return [str(site) for site in hl.sites(model, *where)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("h.1", ["h.1"]),
        ("h.*", ["h.0", "h.1", "h.2"]),
        ("h.*.mlp", ["h.0.mlp", "h.1.mlp", "h.2.mlp"]),
        ("**.mlp", ["h.0.mlp", "h.1.mlp", "h.2.mlp"]),
        ("**.head", ["head"]),
        ("h.{0,2}", ["h.0", "h.2"]),
        ("h.{0, 2}.{attn,norm}", ["h.0.norm", "h.0.attn", "h.2.norm", "h.2.attn"]),
        ("h.1.m*", ["h.1.mlp"]),
        ("h.1.*t*", ["h.1.attn"]),
        ("h.1.**", ["h.1.norm", "h.1.attn", "h.1.mlp", "h.1.mlp.0", "h.1.mlp.1", "h.1.mlp.2"]),
        ("h.**.0", ["h.0", "h.0.mlp.0", "h.1.mlp.0", "h.2.mlp.0"]),
        ("", [""]),
        ("h.1:input", ["h.1:input"]),
        ("h.*:grad_output[0]", ["h.0:grad_output[0]", "h.1:grad_output[0]", "h.2:grad_output[0]"]),
        ("h.*#1[:, -1]", ["h.0#1[:, -1]", "h.1#1[:, -1]", "h.2#1[:, -1]"]),
    ],
)
def test_text_means_these_sites(where: str, expected: list[str]) -> None:
    assert names(GPT(), where) == expected


def test_two_stars_mean_everything_but_the_root_and_containers() -> None:
    model = GPT()
    everything = [name for name, _ in model.named_modules() if name not in ("", "h")]
    assert names(model, "**") == everything
    assert names(model) == ["", *everything]
    assert names(mlp(), "*") == ["0", "1", "2"]


def test_a_star_is_never_empty() -> None:
    model = nn.ModuleDict({"mlp": nn.ReLU(), "mlp2": nn.ReLU()})
    assert names(model, "mlp*") == ["mlp2"]


def test_objects_types_expressions_and_predicates_mean_modules() -> None:
    model = GPT()
    assert names(model, model.h[1].mlp) == ["h.1.mlp"]
    assert names(model, model) == [""]
    assert names(model, Block) == ["h.0", "h.1", "h.2"]
    assert names(model, (nn.LayerNorm, ":input[0]")) == ["h.0.norm:input[0]", "h.1.norm:input[0]", "h.2.norm:input[0]"]
    assert names(model, re.compile(r"h\.[12]\.attn")) == ["h.1.attn", "h.2.attn"]
    assert names(model, lambda name, module: name.endswith("mlp.2")) == ["h.0.mlp.2", "h.1.mlp.2", "h.2.mlp.2"]
    assert names(model, lambda name, module: getattr(module, "out_features", 0) == 4) == ["head"]
    assert names(model, hl.Site("h.1", "input", "[0]")) == ["h.1:input[0]"]


@pytest.mark.parametrize(
    "pair",
    [
        ("h.1", ":input[0]#1"),
        (hl.Site("h.1"), ":input[0]#1"),
        (re.compile(r"h\.1"), "#1:input[0]"),
        (lambda name, module: name == "h.1", "#1:input[0]"),
        (["h.1"], ":input[0]#1"),
    ],
)
def test_a_pair_adds_a_port_subscripts_and_a_call_to_any_of_these(pair: Any) -> None:
    assert names(GPT(), pair) == ["h.1#1:input[0]"]


def test_the_second_of_a_pair_is_only_a_port_and_subscripts() -> None:
    assert names(mlp(), ("0", "1")) == ["0", "1"]
    with pytest.raises(hl.SiteError, match="port"):
        names(mlp(), ("0:input", ":output"))


def test_lists_mean_all_that_is_in_them_each_place_once_in_the_order_asked_for() -> None:
    model = GPT()
    assert names(model, ["head", ("h.{0,1}",), [nn.LayerNorm]], "h.0", "head") == [
        "head", "h.0", "h.1", "h.0.norm", "h.1.norm", "h.2.norm",
    ]  # fmt: skip
    assert names(model, (name for name in ("head", "h.0"))) == ["head", "h.0"]


NOT_PLACES: dict[str, tuple[Any, str]] = {
    "a number": (3, says("int names no place")),
    "nothing": (None, says("NoneType names no place")),
    "a tensor": (torch.ones(1), says("Tensor names no place")),
    "an empty list": ([], "nothing"),
    "a type that no module has": (nn.Conv2d, says("matches nothing and has", "Conv2d", "GPT", "Block, GPT, LayerNorm")),
    "a predicate that nothing satisfies": (lambda name, module: False, says("matches nothing", "GPT")),
    "an unknown port": (hl.Site("h.0", "outptu"), says("did you mean", "outptu", "output")),
    "an unknown member": (hl.Site("h.0", member="relu"), says("has no member", "relu")),
    "an unknown method": (hl.Site("h.0", member="relu()"), says("Block has no such method", "h.0.relu()")),
    "a bad index": (hl.Site("h.0", index="[os]"), "not a subscript"),
    "an unknown path": (hl.Site("h.9"), says("matches nothing did you mean", "GPT", "h.9")),
}


@pytest.mark.parametrize("what", NOT_PLACES)
@pytest.mark.parametrize("verb", [hl.sites, hl.capture, hl.Hooks.capture])
def test_what_names_no_place_is_refused_at_once(what: str, verb: Callable[..., Any]) -> None:
    where, message = NOT_PLACES[what]
    model = GPT()
    with pytest.raises(hl.SiteError, match=message):
        verb(hl.Hooks(model) if verb is hl.Hooks.capture else model, where)
    assert len(hl.attached(model)) == 0


@pytest.mark.parametrize("verb", [hl.sites, hl.Hooks, hl.capture, hl.attached])
def test_a_model_is_a_module(verb: Callable[..., Any]) -> None:
    with pytest.raises(hl.HooklineError, match=r"Module.*not (type|list)|not (type|list)"):
        verb([nn.ReLU()])


def test_capture_without_a_place_is_refused() -> None:
    with pytest.raises(hl.SiteError, match=says("capture what hl sites model")):
        hl.capture(mlp())


class Answer(NamedTuple):
    logits: Tensor
    extra: tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Frozen:
    state: Tensor
    inner: Answer


class Structured(nn.Module):
    """Returns a frozen dataclass with a named tuple in it."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Frozen:
        return Frozen(x + 1, Answer(x * 2, (x * 3, x * 4)))


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ('["state"]', lambda x: x + 1),
        ('["inner"][0]', lambda x: x * 2),
        ('["inner"]["logits"][0, 1]', lambda x: (x * 2)[0, 1]),
        ('["inner"]["extra"][-1][:, 1:3]', lambda x: (x * 4)[:, 1:3]),
        ('["inner"][1][0][..., ::2]', lambda x: (x * 3)[..., ::2]),
        ('["inner"][1][0][None, -1]', lambda x: (x * 3)[None, -1]),
    ],
)
def test_subscripts_reach_into_nested_values_to_see_and_to_change(index: str, part: Callable[[Tensor], Tensor]) -> None:
    model, x = Structured(), torch.randn(2, 4)
    output, acts = hl.run(model, x, capture=index)
    assert torch.equal(acts[index], part(x))
    with hl.patch(model, {index: 7.0}), hl.capture(model, index, "") as changed:
        model(x)
    assert changed[index].eq(7).all()
    assert type(changed[""]) is Frozen
    assert type(changed[""].inner) is Answer
    assert not output.inner.logits.eq(7).any()


def test_subscripts_reach_into_the_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x + 1, x + 2))

    model, x = Model(), torch.randn(2, 4)
    sites = ['["last_hidden_state"]', "[0]", '["hidden_states"][-1][:, 0]', "[1][0]"]
    _, acts = hl.run(model, x, capture=[*sites, ""])
    for site, expected in zip(sites, (x, x, (x + 2)[:, 0], x + 1), strict=True):
        assert torch.equal(acts[site], expected)
    assert type(acts[""]) is outputs.BaseModelOutput
    output = hl.run(model, x, patch={'["last_hidden_state"]': 0.0, "[1][0]": 1.0})
    assert type(output) is outputs.BaseModelOutput
    assert output.last_hidden_state.count_nonzero() == 0
    assert torch.equal(output["last_hidden_state"], output[0])
    assert output.hidden_states[0].eq(1).all()
    with pytest.raises(hl.SiteError, match=says("is not a part of BaseModelOutput", "['last_hiden_state']")):
        hl.run(model, x, capture='["last_hiden_state"]')


@pytest.mark.parametrize("change", [{"patch": 0.0}, {"edit": lambda _: 0.0}], ids=["patch", "edit"])
def test_a_field_that_a_model_of_transformers_did_not_make_is_not_changed(change: dict[str, Any]) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return outputs.BaseModelOutput(last_hidden_state=x)

    site = '["hidden_states"]'
    message = says("BaseModelOutput of last_", "hidden_states")
    with pytest.raises(hl.EditError, match=message) as raised:
        hl.run(Model(), torch.ones(2, 4), **{name: {site: value} for name, value in change.items()})
    assert str(raised.value).startswith(f"'{site}': ")


def test_a_part_that_is_not_there_is_refused_with_what_is_near() -> None:
    x = torch.ones(2, 4)
    for site, message in {
        '["logit"]': says("is not a part of dict did", '["logit"]', "logit", "logits"),
        '["hidden"][2]': says("is not a part of tuple", "tuple of 2"),
        '["hidden"]["x"]': says("is not a part of tuple of", "['x']", "tuple of 2"),
        "body[:, 4]": says("is not a part of float32 index", "(2, 4)", "body[:, 4]", 4),
        'body["x"]': says("is not a part of float32", "(2, 4)", "['x']"),
        'body:inputs["mask"]': says("is not a part of dict", "['mask']"),
    }.items():
        with pytest.raises(hl.SiteError, match=message):
            hl.run(Nested(), x, capture=site)


def test_a_star_in_a_subscript_makes_a_site_for_each_index() -> None:
    model, x = mlp(), torch.randn(3, 4)
    with hl.capture(model, "0[*]", "1[:, *]", "2[*, *]") as acts:
        model(x)
    hidden = model[0](x)
    assert list(acts)[:3] == ["0[0]", "0[1]", "0[2]"]
    assert [key for key in acts if key.startswith("1")] == [f"1[:, {index}]" for index in range(8)]
    assert len([key for key in acts if key.startswith("2")]) == 6
    assert torch.equal(acts["0[1]"], hidden[1])
    assert torch.equal(acts["1[:,5]"], hidden.relu()[:, 5])
    assert acts["2[2, 1]"].shape == ()
    with pytest.raises(hl.NotCaptured, match=says("was not captured did", "0[3]")):
        acts["0[3]"]
    with pytest.raises(hl.NotCaptured, match=r"'0\[\*\]'.*0\[0\]"):
        acts["0[*]"]


def test_a_star_in_a_subscript_goes_over_tuples_and_dicts_too() -> None:
    x = torch.randn(2, 4)
    _, acts = hl.run(Nested(), x, capture=['["hidden"][*]', '["hidden"][*][:, *]'])
    assert torch.equal(acts['["hidden"][0]'], x)
    assert torch.equal(acts['["hidden"][1][:, 3]'], acts['["hidden"][1]'][:, 3])
    _, whole = hl.run(Nested(), x, capture="[*]")
    assert torch.equal(whole['["hidden"]'][0], x)
    assert whole['["steps"]'] == 3


def test_a_star_in_a_subscript_changes_each_part_by_itself() -> None:
    model, x = nn.Sequential(nn.Identity()), torch.arange(12.0).reshape(3, 4)
    shapes = []

    def double(value: Tensor) -> Tensor:
        shapes.append(tuple(value.shape))
        return value * 2

    assert torch.equal(hl.run(model, x, edit={"0[:, *]": double}), x * 2)
    assert shapes == [(3,)] * 4
    assert torch.equal(hl.run(model, x, patch={"0[*, 1]": 0.0})[:, 1], torch.zeros(3))


def test_ports_see_what_goes_in_and_out_however_it_is_passed() -> None:
    model, x = GPT(depth=1), tokens()
    with hl.capture(model, "h.0:input", "h.0:inputs", "h.0:inputs['scale']", "h.0", "h.0.mlp:input") as acts:
        model(x)
    assert torch.equal(acts["h.0:input"], x)
    assert list(acts["h.0:inputs"]) == ["x", "scale"]
    assert acts["h.0:inputs['scale']"] == 0.5
    assert torch.equal(acts["h.0"], model.h[0](x, scale=0.5))
    _, named = hl.run(model.h[0], x=x, scale=2.0, mask=None, capture=[":input", ":inputs"])
    assert torch.equal(named[":input"], x)
    assert named[":inputs"]["mask"] is None


class Variadic(nn.Module):
    """A module that takes any number of tensors, including none."""

    def forward(self, first: Tensor | None = None, *others: Tensor, **named: Tensor) -> Tensor:
        return sum([*others, *named.values()], torch.zeros(2))


def test_further_arguments_have_the_name_of_the_parameter_that_takes_them() -> None:
    a, b, c, d = (torch.full((2,), float(number)) for number in range(4))
    model = Variadic()
    output, acts = hl.run(model, a, b, c, last=d, capture=[":inputs", ':inputs["others"][1]'])
    assert list(acts[":inputs"]) == ["first", "others", "last"]
    assert torch.equal(acts[':inputs["others"][1]'], c)
    assert output.tolist() == [6.0, 6.0]
    assert hl.run(model, a, b, c, last=d, patch={':inputs["others"][0]': 10.0}).tolist() == [15.0, 15.0]
    assert hl.run(model, a, b, last=d, edit={':inputs["last"]': lambda value: value * 2}).tolist() == [7.0, 7.0]


def test_the_input_of_a_call_without_arguments_does_not_fire() -> None:
    with pytest.raises(hl.NeverFired, match=says("did not fire called", ":input")):
        hl.run(Variadic(), capture=":input")
    _, acts = hl.run(Variadic(), capture=":inputs")
    assert acts[":inputs"] == {}


def test_a_site_of_one_call_fires_on_that_call_only() -> None:
    model, x = mlp(), torch.ones(2, 4)
    with hl.capture(model, "0#1", "0:input#2") as acts, hl.patch(model, {"0#1": 0.0}):
        for number in range(3):
            model(x * number)
    assert torch.equal(acts["0#1"], model[0](x))
    assert torch.equal(acts["0#2:input"], x * 2)


def test_a_part_that_is_named_and_matched_by_a_star_is_one_site() -> None:
    _, acts = hl.run(mlp(), torch.ones(2, 4), capture=["0[*]", "0[0]"])
    assert sorted(acts) == ["0[0]", "0[1]"]
    assert len(acts) == 2


def test_parameters_that_are_named_together_are_found_as_each_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[3].weight = model[1].weight
    names = [f"{number}.weight:param" for number in (1, 0, 3, 2)] + ["2.bias:param"]
    together = find_places(model, names)
    assert together == [find_places(model, [name])[0] for name in names]
    assert together[2].holders == ((model[3], "weight"), (model[1], "weight"))


def test_modules_that_are_given_together_are_found_as_each_alone():
    shared = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    model.__dict__["hidden"] = nn.Tanh()
    objects = [model[2], shared, model[0], model.hidden]
    together = find_places(model, objects)
    assert together == [find_places(model, [one])[0] for one in objects]
    assert [place.site.path for place in together[:3]] == ["2", "1", "0"]


@pytest.mark.parametrize("where", ["h.{0,9}", "h.{0,9}.mlp", "h.{0,9}.attn.weight:param", "h.{0,9}:input"])
def test_a_number_in_braces_that_nothing_has_is_told_by_a_warning(where) -> None:
    with pytest.warns(hl.HooklineWarning, match=says("nothing there is named", "9")):
        found = names(GPT(), where)
    assert len(found) == 1
    with pytest.warns(hl.HooklineWarning, match=says("nothing there is named", "9")), hl.capture(GPT(), where):
        pass


def test_of_names_in_braces_a_model_may_have_one_or_the_other() -> None:
    assert names(GPT(), "h.0.{attn,self_attn}") == ["h.0.attn"]
    assert names(GPT(), "h.{0,1}.{mlp,ffn}") == ["h.0.mlp", "h.1.mlp"]


def test_a_predicate_that_does_not_take_a_name_and_a_module_is_refused() -> None:
    model = GPT()
    with pytest.raises(hl.SiteError, match=says("lambda name names no place")):
        hl.sites(model, lambda name: "mlp" in name)
    with pytest.raises(hl.SiteError, match=says("a method of a module")):
        hl.sites(model, model.forward)
    assert names(model, lambda *both: both[0] == "h.0") == ["h.0"]


def test_a_regular_expression_that_matches_a_part_of_a_name_is_told_that_it_has_to_match_the_whole() -> None:
    with pytest.raises(hl.SiteError, match=says("has to match the whole", "h.0.mlp")):
        hl.sites(GPT(), re.compile("mlp$"))


def test_a_range_of_names_in_brackets_is_told_of_braces() -> None:
    with pytest.raises(hl.SiteError, match=says("several names are written with", "h.{0,1,2}")):
        hl.sites(GPT(), "h.[0-2]")


def test_many_names_are_found_as_each_is_alone() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1), nn.ReLU()), "b": nn.Linear(1, 1)})
    model.add_module("b:grad_output", nn.Identity())
    model["tied"] = model["b"]
    texts = ["a.0", "a.1", "b", "a.0:grad_output", "a:grad_output", "b:grad_output", "tied", "a.*", "**", "a\\.0"]
    for size in (2, 3):
        for chosen in itertools.permutations(texts, size):
            both = []
            for options in ({}, {"transform": len}):
                try:
                    hooks = hl.capture(model, *chosen, **options)
                    both.append([(hook.site, hook.action.kind) for hook in hooks])
                except hl.SiteError as error:
                    both.append(str(error))
            assert both[0] == both[1], chosen
