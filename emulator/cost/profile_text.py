"""A device profile as TOML text."""

import json

from emulator.cost.device import Device


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, float):
        text = repr(value)
        return text if "e" in text or "." in text else f"{text}.0"
    return json.dumps(value, ensure_ascii=False)  # strings, whole numbers, lists: as in JSON


def _table(head: str, fields: dict[str, object]) -> list[str]:
    return [head, *(f"{name} = {_value(value)}" for name, value in fields.items() if value is not None), ""]


def profile_text(device: Device) -> str:
    """The whole profile: hardware with its sources, then coefficients with theirs. load_device reads it back."""
    data = device.model_dump()
    simple = {key: data[key] for key in ("title", "aliases", "inherits")}
    lines = [f"{name} = {_value(value)}" for name, value in simple.items() if value is not None]
    lines.append("")
    for name in ("cores", "memory", "cube", "vector"):
        lines += _table(f"[{name}]", data[name])
    for link in data["links"]:
        lines += _table("[[links]]", link)
    for key, found in data["coefficients"].items():
        lines += _table(f"[coefficients.{json.dumps(key)}]", found)
    return "\n".join(lines)
