"""Token counts from passing answers: a Lua filter for Envoy. Pure.

An answer is not parsed and not held: each chunk is searched for the two objects that carry counts,
``"usage"`` (OpenAI) and ``"timings"`` (llama.cpp), together with what the chunk before left open.
Within a JSON string their quotes would be escaped, so no text that a model writes can look like
one. Envoy's own filters were tried first: ``sse_to_metadata`` of 1.40 crashes on an event whose
data is a JSON scalar and takes twice the time, ``json_to_metadata`` holds whole answers and refuses
those above a buffer's limit.
What does not belong here: the meaning of the counts (``records.py``).
"""

from __future__ import annotations

from preheat.dataplane.envoy.parts import METADATA, TYPE, Json

OPEN_MAX_BYTES = 4096
"""Longest such object that is recognised when it comes in pieces."""

_LUA = """
local objects = {
  {key = '"usage"', names = {"prompt_tokens", "completion_tokens"}},
  {key = '"timings"', names = {"predicted_n", "predicted_ms", "prompt_n", "cache_n"}},
}
local longest_key = 9

-- Notes the counts of all such objects in data; returns where one begins that is not complete.
local function look(handle, data, wanted)
  local from = 1
  while true do
    local at, last = data:find(wanted.key, from, true)
    if not at then return nil end
    local object, after = data:match("^%s*:%s*(%b{})()", last + 1)
    if object then
      for _, name in ipairs(wanted.names) do
        local number = tonumber(object:match('"' .. name .. '"%s*:%s*(%-?[%d.eE+-]+)'))
        if number then
          handle:streamInfo():dynamicMetadata():set("@metadata@", name, number)
        end
      end
      from = after
    elseif data:find("^%s*:?%s*$", last + 1) or data:find("^%s*:%s*{", last + 1) then
      return at
    else
      from = last + 1
    end
  end
end

function envoy_on_response(handle)
  local kind = handle:headers():get("content-type") or ""
  local events = kind:find("text/event-stream", 1, true) == 1
  if not events and kind:find("application/json", 1, true) ~= 1 then return end
  local open = ""
  for chunk in handle:bodyChunks() do
    local data = open .. chunk:getBytes(0, chunk:length())
    local keep = #data - longest_key + 2
    for _, wanted in ipairs(objects) do
      if data:find(wanted.key, 1, true) then
        -- An object may stand on several lines of one event.
        local plain = events and data:gsub("\\r?\\ndata:", "\\n") or data
        local at = look(handle, plain, wanted)
        if at and #plain - at < @open_max@ then
          data = plain
          keep = math.min(keep, at)
        end
      end
    end
    open = data:sub(math.max(keep, 1))
  end
end
"""


def usage_filter() -> Json:
    source = _LUA.replace("@metadata@", METADATA).replace("@open_max@", str(OPEN_MAX_BYTES))
    return {
        "name": "envoy.filters.http.lua",
        "typed_config": {
            "@type": TYPE + "envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": source},
        },
    }
