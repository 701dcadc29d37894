"""Every public name has a docstring, an entry in the reference, and an example that is executed."""

import inspect
import re
from functools import cached_property
from importlib import import_module
from types import ModuleType

from support.pages import PAGES, ROOT, code_blocks

import tacit

MODULES = {
    name: getattr(tacit, name)
    for name in tacit.__all__
    if isinstance(getattr(tacit, name), ModuleType)
}
CALLBACKS = ["tacit.integrations.huggingface", "tacit.integrations.lightning"]
EXAMPLES = "\n".join(
    [
        *(code for page in PAGES for kind, code in code_blocks(page) if kind == "python"),
        *(path.read_text() for path in ROOT.glob("examples/*.py")),
    ]
)


def public_names(module):
    """Names of a module without `__all__`: what is defined there."""
    return getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def public_values():
    """All public functions and classes, by their longest name."""
    modules = {f"tacit.{name}": module for name, module in MODULES.items()}
    modules |= {name: import_module(name) for name in CALLBACKS}
    for name, module in {"tacit": tacit, **modules}.items():
        for inner in public_names(module):
            value = getattr(module, inner)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{name}.{inner}", value


VALUES = dict(public_values())


def members(value):
    """Public methods and properties that a class of the library defines itself, as functions."""
    for name, member in vars(value).items():
        if name in getattr(value, "__dataclass_fields__", ()):
            continue  # a default that is a function
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        elif isinstance(member, property | cached_property):
            member = member.fget if isinstance(member, property) else member.func
        if not name.startswith("_") and inspect.isfunction(member):
            yield name, member


def test_every_public_function_class_method_and_property_has_a_docstring():
    without = [f"tacit.{name}" for name, module in MODULES.items() if not module.__doc__]
    for name, value in VALUES.items():
        if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}("):  # a dataclass's own
            without.append(name)
        if inspect.isclass(value):
            without += [f"{name}.{inner}" for inner, member in members(value) if not member.__doc__]
    assert without == []


def entries():
    """Names that have a directive of their own in docs/api, and modules documented as a whole."""
    single: set[str] = set()
    whole: dict[str, set[str]] = {}
    for page in ROOT.glob("docs/api/*.md"):
        module = ""
        for kind, name in re.findall(
            r"^(?:\.\. |   :)(\S+?):+ ?(.*)$", page.read_text(), re.MULTILINE
        ):
            if kind == "automodule":
                module = name
                whole[name] = set()
            elif kind == "no-members":
                whole.pop(module)
            elif kind == "exclude-members":
                whole[module] = set(name.split(", "))
            elif kind.startswith("auto") and kind != "autosummary":
                single.add(name)
            elif kind == "py:data":
                single.add(f"{module}.{name}")
    return single, whole


def test_every_public_name_has_an_entry_in_the_reference():
    """A fast version of what `make docs` checks."""
    single, whole = entries()
    top = {id(getattr(tacit, name)) for name in tacit.__all__}
    missing = []
    for name, value in VALUES.items():
        module, _, last = name.rpartition(".")
        in_module = module in whole and last not in whole[module]
        at_top = module != "tacit" and id(value) in top
        if not (name in single or in_module or at_top):
            missing.append(name)
    assert missing == []
    assert {f"tacit.{name}" for name in MODULES} <= set(whole) | modules_on_pages()


def modules_on_pages():
    """Modules that a page of the reference is about."""
    return set(
        re.findall(
            r"automodule:: (\S+)", "".join(p.read_text() for p in ROOT.glob("docs/api/*.md"))
        )
    )


def words(code):
    """All identifiers in code."""
    return set(re.findall(r"[^\W\d]\w*", code))


def doctests():
    """The code of the docstrings' examples, which pytest executes too."""
    for value in VALUES.values():
        for line in (inspect.getdoc(value) or "").splitlines():
            if line.startswith((">>>", "...")):
                yield line


def types_in_results():
    """Names in the types of what functions return and classes have: nobody has to make these."""
    for value in VALUES.values():
        yield from getattr(value, "__annotations__", {}).values()
        functions = [value] if inspect.isfunction(value) else []
        if inspect.isclass(value):
            functions = [member for _, member in members(value)]
        for function in functions:
            yield getattr(function, "__annotations__", {}).get("return", "")


def test_every_public_name_is_in_an_executed_example():
    """In README, docs, examples or a docstring; but for classes that only results contain."""
    used = words("\n".join([EXAMPLES, *doctests()]))
    results = words("\n".join(map(str, types_in_results())))
    unused = [
        name
        for name, value in VALUES.items()
        if (last := name.rpartition(".")[2]) not in used
        and not (inspect.isclass(value) and last in results)
    ]
    assert unused == []
