"""Names of the library in backticks become links to their entries; public names without one fail."""

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import tacit

logger = logging.getLogger(__name__)
NAME = re.compile(r"(?:tacit\.)?([A-Za-z_][\w.]*)(?:\(.*\))?$", re.DOTALL)


def entry(objects, text: str):
    """The entry of the name that a piece of code mentions, such as `tacit.l2()`; or None."""
    match = NAME.match(text)
    if not match or not (text.startswith("tacit.") or "." in text or text.endswith(")")):
        return None
    return objects.get(f"tacit.{match[1]}")


class LinkNames(SphinxPostTransform):
    """Links from code in the text to the reference."""

    default_priority = 5

    def run(self, **_):
        """Replace literals outside links and headings."""
        domain = self.env.get_domain("py")
        for literal in list(self.document.findall(nodes.literal)):
            parents = (nodes.reference, nodes.title, nodes.desc) if hasattr(nodes, "desc") else (
                nodes.reference, nodes.title
            )
            if isinstance(literal.parent, parents):
                continue
            found = entry(domain.objects, literal.astext())
            if found is None:
                continue
            reference = make_refnode(
                self.app.builder, self.env.docname, found.docname, found.node_id, literal.deepcopy()
            )
            literal.replace_self(reference)


def check_complete(app, env) -> None:
    """Warn of public names that have no entry in the reference."""
    objects = env.get_domain("py").objects
    for name in tacit.__all__:
        if f"tacit.{name}" not in objects:
            logger.warning("tacit.%s has no entry in the API reference", name)


def setup(app):
    """Register the transform and the check."""
    app.add_post_transform(LinkNames)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True}
