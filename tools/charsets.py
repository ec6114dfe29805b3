"""Python's codecs for the names that the web gives character sets (WHATWG Encoding, 4.2)."""

import codecs
import re

__all__ = ["codec_of"]

_ONLY_ON_THE_WEB = {
    "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8",
    "iso8859-6": "csiso88596e csiso88596i iso-8859-6-e iso-8859-6-i",
    "iso8859-7": "sun_eu_greek",
    "iso8859-8": "csiso88598e csiso88598i iso-8859-8-e iso-8859-8-i logical visual",
    "iso8859-15": "csisolatin9",
    "koi8-r": "koi koi8",
    "koi8-u": "koi8-ru",
    "mac-roman": "csmacintosh mac",
    "mac-cyrillic": "mac-ukrainian",
    "cp874": "dos-874 windows-874",
    "gb18030": "csgb2312 gb_2312 gb_2312-80 windows-936",
    "cp950": "cn-big5 x-big5 windows-950",
    "euc_jp": "cseucpkdfmtjapanese",
    "cp932": "windows-31j windows-932",
    "cp949": "cseuckr csksc56011987 iso-ir-149 ks_c_5601-1989 ksc_5601 windows-949",
    "utf-16-be": "unicodefffe",
    "utf-16-le": "csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff",
}
"""Names that Python does not know; those with ``x-`` before them it knows without."""
_WEB_NAMES = {name: codec for codec, names in _ONLY_ON_THE_WEB.items() for name in names.split()}
_ISO_8859 = re.compile(r"iso8859(\d{1,2})")
"""``iso88592`` is ``iso8859-2``."""
_WIDENED = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "cp950",
    "shift_jis": "cp932",
    "euc_jp": "euc_jis_2004",
    "euc_kr": "cp949",
    "tis-620": "cp874",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "utf-16": "utf-16-le",
}
"""What the web calls by the name of a smaller character set."""
_CODECS = frozenset(
    (
        *("utf-8", "utf-16-le", "utf-16-be", "gb18030", "cp950", "big5hkscs"),
        *("euc_jis_2004", "cp932", "iso2022_jp", "cp949", "cp874"),
        *("koi8-r", "koi8-u", "cp866", "mac-roman", "mac-cyrillic"),
        *(f"cp125{n}" for n in range(9)),
        *(f"iso8859-{n}" for n in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)),
    )
)
"""Codecs of text, by Python's names; the others (zip, punycode, ...) are slow or explode."""


def codec_of(name: str) -> str | None:
    """The codec of a character set; None: there is no such set of text.

    Example: ``codec_of("GB2312")`` is ``"gb18030"``, ``codec_of("zip")`` None.
    """
    name = name.strip().lower().removeprefix("x-")
    name = _WEB_NAMES.get(name, _ISO_8859.sub(r"iso8859-\1", name))
    try:
        codec = codecs.lookup(name).name
    except (LookupError, ValueError):
        return None
    codec = _WIDENED.get(codec, codec)
    return codec if codec in _CODECS else None
