"""JSON schemas of requests (spec/api.md 7.4): limits, keywords that cannot be honoured, compiling.

A keyword that the grammar cannot enforce is refused with its path when the client asked for strict,
and otherwise dropped with a warning: the reply may then break that keyword and nothing else.
"""

from collections.abc import Mapping
from typing import Any

from twining.engine.grammar import check_source
from twining.errors import RequestError
from twining.serving.json_text import dump_json

Json = dict[str, Any]

MAX_SCHEMA_BYTES = 1 << 20
MAX_SCHEMA_DEPTH = 64
MAX_PATH_CHARS = 256
MAX_PROPERTIES = 4000  # of a whole schema; compiling time grows with the square, to about a second
# One blank, or a line feed and indentation, wherever JSON allows white space: no endless padding.
WHITE_SPACE = r"\x20|\n\x20{0,64}"
UNSUPPORTED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
FORMATS = frozenset(
    {
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
    }
)
ONE_SCHEMA = ("additionalProperties", "items")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
ONE_OF = "oneOf constraints"  # how the compiler's message begins


def bad_schema(param: str, why: str) -> RequestError:
    """The refusal of a schema; param is the path of the part that is at fault."""
    if len(param) > MAX_PATH_CHARS:
        param = param[:MAX_PATH_CHARS] + "..."
    return RequestError(f"{param}: {why}", code="invalid_json_schema", param=param)


class SchemaCleaner:
    """Copies schemas, keeping what the grammar can enforce; collects warning codes.

    reference_root: where `#` will be in the compiled document, when a schema is moved.
    """

    def __init__(self, *, strict: bool, reference_root: str = "#") -> None:
        self.warnings: list[str] = []
        self._num_properties = 0
        self._strict = strict
        self._reference_root = reference_root

    def clean(self, schema: object, param: str) -> Json:
        """A copy of a whole schema. Raises RequestError invalid_json_schema."""
        check_size(schema, param)
        cleaned = self._any(schema, param)
        if isinstance(cleaned, bool):
            if not cleaned:
                raise bad_schema(param, "false allows no value; use another schema")
            return {}
        return cleaned

    def ignore(self, keyword: str, param: str, why: str = "cannot be enforced") -> None:
        """Note a keyword that is dropped. Raises RequestError if the client wants strict."""
        if self._strict:
            raise bad_schema(param, f"{keyword} {why}; remove it or set strict to false")
        code = f"ignored:{keyword}"
        if code not in self.warnings:
            self.warnings.append(code)

    def _any(self, schema: object, param: str) -> Json | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise bad_schema(param, "must be an object or a boolean")
        done: Json = {}
        for key, value in schema.items():
            where = f"{param}.{key}"
            if key in UNSUPPORTED:
                self.ignore(key, where)
            elif key == "format" and not (isinstance(value, str) and value in FORMATS):
                self.ignore(key, where, "has a value that cannot be enforced")
            elif key in SCHEMA_MAPS and isinstance(value, dict):
                self._num_properties += len(value)
                if self._num_properties > MAX_PROPERTIES:
                    raise bad_schema(where, f"more than {MAX_PROPERTIES} properties in a schema")
                done[key] = {name: self._any(v, f"{where}.{name}") for name, v in value.items()}
            elif key in SCHEMA_LISTS and isinstance(value, list):
                done[key] = [self._any(v, f"{where}[{n}]") for n, v in enumerate(value)]
            elif key in ONE_SCHEMA and isinstance(value, dict | bool):
                done[key] = self._any(value, where)
            elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
                done[key] = self._reference_root + value[1:]
            elif key != "x-guidance":  # settings of the compiler are the server's
                done[key] = value
        self._old_items(done, schema, param)
        return _with_null(done) if schema.get("nullable") is True else done

    def _old_items(self, done: Json, schema: Json, param: str) -> None:
        """Lists of item schemas, as drafts before 2020 wrote them."""
        items = schema.get("items")
        if not isinstance(items, list):
            return
        done["prefixItems"] = [self._any(v, f"{param}.items[{n}]") for n, v in enumerate(items)]
        done["items"] = self._any(schema.get("additionalItems", True), f"{param}.additionalItems")
        done.pop("additionalItems", None)


def _with_null(schema: Json) -> Json:
    """`nullable: true` of OpenAPI."""
    rest = {key: value for key, value in schema.items() if key != "nullable"}
    if isinstance(rest.get("type"), str) and not {"enum", "const"} & rest.keys():
        return {**rest, "type": [rest["type"], "null"]}
    return {"anyOf": [rest, {"type": "null"}]}


def check_size(schema: object, param: str) -> None:
    """Raises RequestError for a schema beyond 1 MiB of text or 64 levels."""
    level = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise bad_schema(param, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
    try:
        size = len(dump_json(schema).encode())
    except ValueError as err:
        raise bad_schema(param, f"has no JSON form: {err}") from err
    if size > MAX_SCHEMA_BYTES:
        raise bad_schema(param, f"has {size} bytes of text; at most {MAX_SCHEMA_BYTES} are allowed")


def compile_schema(schema: Json, param: str, cleaner: SchemaCleaner) -> Json:
    """The document to compile, tried once. schema: cleaned. Raises RequestError."""
    options: Json = {"whitespace_pattern": WHITE_SPACE, "whitespace_flexible": True}
    document = {**schema, "x-guidance": options}
    problem = _problem(document)
    if problem.startswith(ONE_OF):
        cleaner.ignore("oneOf", _path_of_one_of(schema, param) or param, "has overlapping members")
        document["x-guidance"] = {**options, "coerce_one_of": True}
        problem = _problem(document)
    if problem:
        raise bad_schema(param, f"cannot be used: {problem}")
    return document


def _problem(document: Json) -> str:
    return check_source(dump_json({"grammars": [{"json_schema": document}]}))


def _path_of_one_of(schema: object, param: str) -> str | None:
    """Path of the first oneOf, in order of writing."""
    if isinstance(schema, Mapping):
        if "oneOf" in schema:
            return f"{param}.oneOf"
        inner = [(value, f"{param}.{key}") for key, value in schema.items()]
    elif isinstance(schema, list):
        inner = [(value, f"{param}[{n}]") for n, value in enumerate(schema)]
    else:
        return None
    return next((p for value, where in inner if (p := _path_of_one_of(value, where))), None)
