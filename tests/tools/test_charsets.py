import pytest

from tools.charsets import codec_of

LABELS = {
    ("Grün", "utf-8"): "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 utf-8 utf8 x-unicode20utf8",
    ("дуб", "ibm866"): "866 cp866 csibm866 ibm866",
    ("žír", "iso-8859-2"): (
        "csisolatin2 iso-8859-2 iso-ir-101 iso8859-2 iso88592 iso_8859-2 iso_8859-2:1987 l2 latin2"
    ),
    ("ĝĥ", "iso-8859-3"): (
        "csisolatin3 iso-8859-3 iso-ir-109 iso8859-3 iso88593 iso_8859-3 iso_8859-3:1988 l3 latin3"
    ),
    ("ąžuols", "iso-8859-4"): (
        "csisolatin4 iso-8859-4 iso-ir-110 iso8859-4 iso88594 iso_8859-4 iso_8859-4:1988 l4 latin4"
    ),
    ("дуб", "iso-8859-5"): (
        "csisolatincyrillic cyrillic iso-8859-5 iso-ir-144 iso8859-5 iso88595 iso_8859-5 "
        "iso_8859-5:1988"
    ),
    ("بلوط", "iso-8859-6"): (
        "arabic asmo-708 csiso88596e csiso88596i csisolatinarabic ecma-114 iso-8859-6 "
        "iso-8859-6-e iso-8859-6-i iso-ir-127 iso8859-6 iso88596 iso_8859-6 "
        "iso_8859-6:1987"
    ),
    ("δρυς", "iso-8859-7"): (
        "csisolatingreek ecma-118 elot_928 greek greek8 iso-8859-7 iso-ir-126 iso8859-7 "
        "iso88597 iso_8859-7 iso_8859-7:1987 sun_eu_greek"
    ),
    ("אלון", "iso-8859-8"): (
        "csiso88598e csisolatinhebrew hebrew iso-8859-8 iso-8859-8-e iso-ir-138 iso8859-8 "
        "iso88598 iso_8859-8 iso_8859-8:1988 visual csiso88598i iso-8859-8-i logical"
    ),
    ("ąžuols", "iso-8859-10"): "csisolatin6 iso-8859-10 iso-ir-157 iso8859-10 iso885910 l6 latin6",
    ("ąžuolas", "iso-8859-13"): "iso-8859-13 iso8859-13 iso885913",
    ("ŵŷ", "iso-8859-14"): "iso-8859-14 iso8859-14 iso885914",
    ("œuf €", "iso-8859-15"): "csisolatin9 iso-8859-15 iso8859-15 iso885915 iso_8859-15 l9",
    ("știe", "iso-8859-16"): "iso-8859-16",
    ("дуб", "koi8-r"): "cskoi8r koi koi8 koi8-r koi8_r",
    ("дубиї", "koi8-u"): "koi8-ru koi8-u",
    ("Grün", "mac-roman"): "csmacintosh mac macintosh x-mac-roman",
    ("ต้นโอ๊ก", "cp874"): "dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874",
    ("žír", "cp1250"): "cp1250 windows-1250 x-cp1250",
    ("дуб", "cp1251"): "cp1251 windows-1251 x-cp1251",
    ("“Grün”", "cp1252"): (
        "ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100 "
        "iso8859-1 iso88591 iso_8859-1 iso_8859-1:1987 l1 latin1 us-ascii windows-1252 "
        "x-cp1252"
    ),
    ("δρυς", "cp1253"): "cp1253 windows-1253 x-cp1253",
    ("“meşe”", "cp1254"): (
        "cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9 "
        "iso_8859-9:1989 l5 latin5 windows-1254 x-cp1254"
    ),
    ("אלון", "cp1255"): "cp1255 windows-1255 x-cp1255",
    ("بلوط", "cp1256"): "cp1256 windows-1256 x-cp1256",
    ("ąžuolas", "cp1257"): "cp1257 windows-1257 x-cp1257",
    ("đơn", "cp1258"): "cp1258 windows-1258 x-cp1258",
    ("дуб", "mac-cyrillic"): "x-mac-cyrillic x-mac-ukrainian",
    ("橡树镕", "gb18030"): (
        "chinese csgb2312 csiso58gb231280 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58 x-gbk gb18030"
    ),
    ("橡樹", "big5"): "big5 big5-hkscs cn-big5 csbig5 x-x-big5",
    ("樫", "euc_jp"): "cseucpkdfmtjapanese euc-jp x-euc-jp",
    ("樫", "iso2022_jp"): "csiso2022jp iso-2022-jp",
    ("樫", "cp932"): "csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis",
    ("참나무", "cp949"): (
        "cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989 "
        "ksc5601 ksc_5601 windows-949"
    ),
    ("Grün", "utf-16be"): "unicodefffe utf-16be",
    ("Grün", "utf-16le"): "csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff utf-16 utf-16le",
}
"""A text, a codec that has its characters, and every name that the WHATWG standard gives it."""


@pytest.mark.parametrize(
    ("text", "codec", "label"),
    [(*known, label) for known, labels in LABELS.items() for label in labels.split()],
)
def test_every_name_of_the_standard_is_known(text, codec, label):
    found = codec_of(f" {label.upper()} ")
    assert found is not None
    assert text.encode(codec).decode(found) == text


@pytest.mark.parametrize(
    ("body", "label", "text"),
    [
        (b"\xf9\xd8\xa1\xe3", "big5", "裏～"),
        (b"\x88\x62", "big5-hkscs", "Ê̄"),
        (b"\xad\xa1\xb3\xdf", "euc-jp", "①樫"),
        (b"\x87\x40", "shift_jis", "①"),
        (b"\x93oak\x94", "latin1", "“oak”"),
    ],
)
def test_what_a_name_means_on_the_web(body, label, text):
    found = codec_of(label)
    assert found is not None and body.decode(found, "replace") == text


@pytest.mark.parametrize("name", ["utf-7", "zip", "idna", "hex", "utf8mb4", "none", "x-", "", "\0"])
def test_what_is_no_character_set_of_the_web_is_none(name):
    assert codec_of(name) is None
