"""The pictures of a run -> HTML, each inside the page as data: a report stays one file. No picture, no section."""

from __future__ import annotations

import base64

from steadygrad.view.read.pictures import Picture, Pictures
from steadygrad.view.render.html import Html, join, tag


def render_pictures(pictures: Pictures) -> Html:
    """Heading and figures; empty where there is nothing to tell."""
    if not pictures.shown and not pictures.left_out:
        return Html("")
    notes = tag("ul", *(tag("li", text) for text in pictures.left_out), class_="notes") if pictures.left_out else None
    figures = tag("div", *map(_render_picture, pictures.shown), class_="pictures")
    return join([tag("h3", "Pictures"), notes, figures])


def _render_picture(picture: Picture) -> Html:
    source = f"data:image/png;base64,{base64.b64encode(picture.data).decode()}"
    image = tag("img", src=source, alt=picture.caption, loading="lazy")
    return tag("figure", image, tag("figcaption", picture.caption), class_="picture")
