"""A number of pages and a seed -> HTML pages with scores that really follow from them, plus a little noise.

Each page is written as markup and parsed by the code that parses real ones. How good it is in each respect is drawn
first; markup and scores follow from that.
"""

from __future__ import annotations

import json
import random

from steadygrad_recipes.seo.features import parse_page
from steadygrad_recipes.seo.readers import Row

METRICS = ("title", "content", "technical", "links", "overall")
"""What a synthetic page is scored on, from 0 to 100."""
TOPICS = ("garden", "bicycle", "coffee", "camera", "mountain", "guitar", "bread", "harbour")
USEFUL = (
    "guide",
    "compare",
    "measure",
    "explain",
    "example",
    "source",
    "detail",
    "season",
    "method",
    "answer",
    "reason",
    "practice",
    "choose",
    "repair",
)
THIN = (
    "best",
    "cheap",
    "click",
    "deal",
    "buy",
    "now",
    "free",
    "win",
    "amazing",
    "offer",
    "discount",
    "sale",
    "hurry",
    "bonus",
    "top",
    "limited",
)
GLUE = ("the", "a", "of", "and", "to", "in", "with", "for", "this", "that", "it", "is", "on", "as", "by", "from")
NOISE = 2.0
"""Standard deviation of the noise in the scores."""


def make_rows(num: int, seed: int) -> list[Row]:
    """Return `num` pages, the same for the same seed."""
    draw = random.Random(seed)
    return [_make_row(draw) for _ in range(num)]


def _make_row(draw: random.Random) -> Row:
    quality = {name: draw.random() for name in METRICS[:-1]}
    page = parse_page(make_page(quality, draw))
    overall = 0.2 * quality["title"] + 0.4 * quality["content"] + 0.2 * quality["technical"] + 0.2 * quality["links"]
    scores = {name: 100.0 * value + draw.gauss(0.0, NOISE) for name, value in {**quality, "overall": overall}.items()}
    return Row(page.features, page.text, scores)


def make_page(quality: dict[str, float], draw: random.Random) -> str:
    """Return the markup of a page that is as good as `quality` says, from 0 to 1 in each respect."""
    topic = draw.choice(TOPICS)
    words = [topic, *draw.sample(USEFUL, 4)]
    title = " ".join(words[: 1 + round(4 * quality["title"])]).title()
    heading = title if draw.random() < quality["title"] else draw.choice(USEFUL)
    body = "".join(_write_section(quality["content"], topic, draw) for _ in range(1 + round(5 * quality["content"])))
    return (
        f"<!doctype html><html{_if(draw, quality['technical'], ' lang=en')}><head><title>{title}</title>"
        f"{_write_head(quality, title, draw)}</head><body><h1>{heading}</h1>{body}{_write_links(quality, draw)}"
        f"{_write_images(quality['technical'], draw)}</body></html>"
    )


def _write_head(quality: dict[str, float], title: str, draw: random.Random) -> str:
    technical = quality["technical"]
    description = f"{title}. " + " ".join(draw.choices(USEFUL, k=round(14 * quality["title"])))
    structured = json.dumps({"@context": "https://schema.org", "@type": "Article", "headline": title})
    scripts = "".join(f'<script src="/{i}.js"></script>' for i in range(round(12 * (1.0 - technical))))
    parts = (
        f'<meta name="description" content="{description}">',
        _if(draw, technical, '<meta name="viewport" content="width=device-width">'),
        _if(draw, technical, '<link rel="canonical" href="https://site.example/page">'),
        _if(draw, technical, f'<script type="application/ld+json">{structured}</script>'),
        _if(draw, 0.3 * (1.0 - technical), '<meta name="robots" content="noindex">'),
        "".join(
            f'<meta property="og:{name}" content="x">' for name in ("title", "type", "url")[: round(3 * technical)]
        ),
        scripts,
    )
    return "".join(parts)


def _write_section(content: float, topic: str, draw: random.Random) -> str:
    sentences = []
    for _ in range(2 + round(4 * content)):
        useful = USEFUL if draw.random() < content else THIN
        length = 8 + round(14 * (1.0 - content)) + draw.randrange(4)
        sentences.append(" ".join(draw.choice(useful if draw.random() < 0.5 else GLUE) for _ in range(length)) + ".")
    return f"<h2>{topic} {draw.choice(USEFUL)}</h2><p>{' '.join(sentences)}</p>"


def _write_links(quality: dict[str, float], draw: random.Random) -> str:
    links = quality["links"]
    inside = "".join(f'<a href="/{draw.choice(USEFUL)}">{draw.choice(USEFUL)}</a> ' for _ in range(round(12 * links)))
    spam = round(8 * (1.0 - links))
    outside = "".join(
        f'<a rel="nofollow" href="https://shop{i}.example/">{draw.choice(THIN)}</a> ' for i in range(spam)
    )
    return f"<nav>{inside}{outside}</nav>"


def _write_images(technical: float, draw: random.Random) -> str:
    alt = ['alt="a picture"' if draw.random() < technical else 'alt=""' for _ in range(draw.randrange(1, 6))]
    return "".join(f'<img src="{i}.jpg" {text}>' for i, text in enumerate(alt))


def _if(draw: random.Random, chance: float, text: str) -> str:
    return text if draw.random() < chance else ""
