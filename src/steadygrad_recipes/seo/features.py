"""One HTML page -> the numbers that search engine optimisation looks at, and its words.

beautifulsoup4 parses it as a browser would: broken markup gives a page with less in it, never an error. Nothing is
fetched and no script is run. Every number is finite. No torch here.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra

FEATURES = (
    "title_length",
    "meta_description_length",
    "num_h1",
    "num_h2",
    "num_h3",
    "heading_skips",
    "num_words",
    "text_ratio",
    "words_per_sentence",
    "readability",
    "num_internal_links",
    "num_external_links",
    "share_nofollow",
    "num_images",
    "share_images_with_alt",
    "num_structured_data",
    "num_open_graph",
    "has_canonical",
    "has_viewport",
    "has_lang",
    "is_noindex",
    "num_scripts",
    "html_kilobytes",
    "title_in_h1",
    "title_in_description",
    "unique_word_share",
)
"""Features of every page, in this order."""
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
SENTENCE = re.compile(r"[.!?]+(?:\s|$)")
VOWELS = re.compile(r"[aeiouyáéíóúàèìòùâêîôûäëïöüæøå]+", re.IGNORECASE)
HIDDEN = ("script", "style", "noscript", "template", "svg")


@dataclass(frozen=True, slots=True)
class Page:
    """A page as the model sees it."""

    features: dict[str, float]
    text: str
    """Title, description, headings and body, as a reader sees them."""


def parse_page(html: str) -> Page:
    """Parse one page."""
    soup = _open(html)
    numbers = {**_describe_head(soup), **_describe_links(soup), **_describe_media(soup)}
    numbers["html_kilobytes"] = len(html.encode("utf-8", "replace")) / 1024.0  # lone surrogates cannot be encoded
    title, description = _text_of(soup.title), _find_meta(soup, "description")
    # After scripts and structured data are counted: this removes them from the tree
    for hidden in soup.find_all(HIDDEN):
        hidden.decompose()
    body = _text_of(soup.body or soup)
    numbers |= _describe_text(body, html)
    numbers["title_in_h1"] = _share_words(title, _text_of(soup.find("h1")))
    numbers["title_in_description"] = _share_words(title, description)
    return Page({name: float(numbers[name]) for name in FEATURES}, " ".join([title, description, body]))


def decode_page(content: bytes) -> str:
    """Return the text of a page in the encoding of its mark, else in UTF-8, the declared one or Windows-1252."""
    dammit = import_extra("recipes", "bs4.dammit", what="reading HTML pages", error=UsageError)
    content, marked = dammit.EncodingDetector.strip_byte_order_mark(content)
    declared = dammit.EncodingDetector.find_declared_encoding(content, is_html=True)
    for encoding in filter(None, (marked, "utf-8", declared)):
        try:
            return content.decode(encoding)
        except (UnicodeDecodeError, LookupError):  # LookupError: a page may declare any name
            continue
    return content.decode("cp1252", errors="replace")


def split_words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return [word.lower() for word in WORD.findall(text)]


def _open(html: str) -> Any:
    bs4 = import_extra("recipes", "bs4", what="reading HTML pages", error=UsageError)
    return bs4.BeautifulSoup(html, "html.parser")


def _describe_head(soup: Any) -> dict[str, float]:
    levels = [int(heading.name[1]) for heading in soup.find_all(re.compile("^h[1-6]$"))]
    root = soup.find("html")
    robots = _find_meta(soup, "robots").lower()
    return {
        "title_length": len(_text_of(soup.title)),
        "meta_description_length": len(_find_meta(soup, "description")),
        "num_h1": levels.count(1),
        "num_h2": levels.count(2),
        "num_h3": levels.count(3),
        "heading_skips": sum(after - before > 1 for before, after in itertools.pairwise(levels)),
        "has_canonical": soup.find("link", rel="canonical") is not None,
        "has_viewport": soup.find("meta", attrs={"name": "viewport"}) is not None,
        "has_lang": root is not None and bool(root.get("lang")),
        "is_noindex": "noindex" in robots,
        "num_open_graph": len(soup.find_all("meta", property=re.compile("^og:"))),
        "num_structured_data": _count_structured(soup),
    }


def _describe_links(soup: Any) -> dict[str, float]:
    links = [link for link in soup.find_all("a", href=True) if not link["href"].startswith(("#", "mailto:", "tel:"))]
    canonical = soup.find("link", rel="canonical", href=True)
    own = _host(canonical["href"]) if canonical is not None else ""
    outside = [link for link in links if _host(link["href"]) not in ("", own)]
    nofollow = sum("nofollow" in _as_words(link.get("rel")) for link in links)
    return {
        "num_internal_links": len(links) - len(outside),
        "num_external_links": len(outside),
        "share_nofollow": nofollow / len(links) if links else 0.0,
    }


def _describe_media(soup: Any) -> dict[str, float]:
    images = soup.find_all("img")
    described = sum(bool((image.get("alt") or "").strip()) for image in images)
    return {
        "num_images": len(images),
        "share_images_with_alt": described / len(images) if images else 1.0,
        "num_scripts": len(soup.find_all("script", src=True)),
    }


def _describe_text(body: str, html: str) -> dict[str, float]:
    words = split_words(body)
    num_words, num_sentences = len(words), max(1, len(SENTENCE.findall(body)))
    num_syllables = sum(max(1, len(VOWELS.findall(word))) for word in words)
    return {
        "num_words": num_words,
        "text_ratio": len(body) / max(1, len(html)),
        "words_per_sentence": num_words / num_sentences,
        "readability": measure_readability(num_words, num_sentences, num_syllables),
        "unique_word_share": len(set(words)) / num_words if words else 0.0,
    }


def measure_readability(num_words: int, num_sentences: int, num_syllables: int) -> float:
    """Return the Flesch reading ease, clamped to 0..100; 0 for a page without words.

    >>> round(measure_readability(100, 8, 140), 1)
    75.7
    """
    if num_words == 0:
        return 0.0
    ease = 206.835 - 1.015 * num_words / max(1, num_sentences) - 84.6 * num_syllables / num_words
    return min(100.0, max(0.0, ease))


def _count_structured(soup: Any) -> int:
    """Count the JSON-LD objects that can be parsed, and microdata."""
    num = len(soup.find_all(attrs={"itemtype": True}))
    for script in soup.find_all("script", type="application/ld+json"):
        try:
            found = json.loads(script.string or "")
        except ValueError:
            continue
        num += len(found) if isinstance(found, list) else 1
    return num


def _find_meta(soup: Any, name: str) -> str:
    found = soup.find("meta", attrs={"name": re.compile(f"^{name}$", re.IGNORECASE)})
    return " ".join(str(found.get("content") or "").split()) if found is not None else ""


def _text_of(element: Any) -> str:
    return "" if element is None else " ".join(element.get_text(" ").split())


def _host(address: str) -> str:
    try:
        return urlsplit(address).netloc.lower().removeprefix("www.")
    except ValueError:  # raised for "http://[" and the like
        return ""


def _as_words(value: Any) -> Iterable[str]:
    return value.split() if isinstance(value, str) else (value or ())


def _share_words(wanted: str, text: str) -> float:
    """Return the share of the words in `wanted` that `text` contains."""
    words, there = split_words(wanted), set(split_words(text))
    share = sum(word in there for word in words) / len(words) if words else 0.0
    assert math.isfinite(share)
    return share
