"""Names of the library in backticks become links to their entries; one without entry fails."""

import importlib
import re
from types import ModuleType

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import tacit

logger = logging.getLogger(__name__)
NAME = re.compile(r"(tacit\.)?([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)


def find_entry(objects, text: str):
    """The entry of the name that a piece of code mentions, such as `tacit.l2()`; or None.

    A word alone, such as `fit` or `loss`, is none: it may be a variable.
    """
    match = NAME.fullmatch(text)
    if not match or not (match[1] or match[3] or "." in match[2]):
        return None
    return objects.get(f"tacit.{match[2]}") or objects.get(f"tacit.regularizers.{match[2]}")


class LinkNames(SphinxPostTransform):
    """Links from code in the text to the reference."""

    default_priority = 5

    def run(self, **_) -> None:
        """Replace code outside of links and headings."""
        objects = self.env.get_domain("py").objects
        for literal in list(self.document.findall(nodes.literal)):
            entry = find_entry(objects, literal.astext())
            if entry is None or isinstance(literal.parent, nodes.reference | nodes.title):
                continue
            link = make_refnode(
                self.app.builder, self.env.docname, entry.docname, entry.node_id, literal.deepcopy()
            )
            literal.replace_self(link)


def public_names():
    """All names that the reference must have: those of tacit, and of its public modules."""
    for name in tacit.__all__:
        yield f"tacit.{name}"
        value = getattr(tacit, name)
        if isinstance(value, ModuleType):
            for inner in getattr(value, "__all__", ()):
                yield f"tacit.{name}.{inner}"


def check_complete(app, env) -> None:
    """Warn of public names that have no entry in the reference."""
    objects = env.get_domain("py").objects
    for name in public_names():
        module, _, last = name.rpartition(".")
        at_top = last in tacit.__all__ and (
            getattr(tacit, last) is getattr(importlib.import_module(module), last)
        )
        if name not in objects and not (at_top and f"tacit.{last}" in objects):
            logger.warning("%s has no entry in the reference: see docs/api", name)


def setup(app):
    """Register the transform and the check."""
    app.add_post_transform(LinkNames)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True}
