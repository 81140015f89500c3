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

COUNTS_KEY = "counts"
"""In the request's metadata: the counts of ``COUNTS`` with a space between each, empty if unknown.
One text is cheaper for Envoy to keep and to send than a number for each."""

COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "prompt_n",
    "cache_n",
    "predicted_n",
    "predicted_ms",
)

_LUA = """
local find, match, sub, gsub = string.find, string.match, string.sub, string.gsub
local keys = {'"usage"', '"timings"'}
local longest_key = 9
local names = {@counts@}
-- Which of the names belong to a key.
local first, final = {1, 3}, {2, 6}
local patterns = {}
for i, name in ipairs(names) do
  patterns[i] = '"' .. name .. '"%s*:%s*(%-?[%d.eE+-]+)'
end

-- Takes the counts of all objects of a key in data; returns where one begins that is not complete.
local function look(data, number_of_key, counts)
  local key = keys[number_of_key]
  local from = 1
  while true do
    local at, last = find(data, key, from, true)
    if not at then return nil end
    local object, after = match(data, "^%s*:%s*(%b{})()", last + 1)
    if object then
      for i = first[number_of_key], final[number_of_key] do
        local count = tonumber(match(object, patterns[i]))
        if count and count >= 0 and count < 1e12 then
          counts[i] = tostring(count)
        end
      end
      counts.found = true
      from = after
    elseif find(data, "^%s*:?%s*$", last + 1) or find(data, "^%s*:%s*{", last + 1) then
      return at
    else
      from = last + 1
    end
  end
end

function envoy_on_response(handle)
  local kind = handle:headers():get("content-type") or ""
  local events = sub(kind, 1, 17) == "text/event-stream"
  if not events and sub(kind, 1, 16) ~= "application/json" then return end
  local counts = {"", "", "", "", "", ""}
  local open = ""
  for chunk in handle:bodyChunks() do
    local data = open .. chunk:getBytes(0, chunk:length())
    local keep = #data - longest_key + 2
    for number = 1, #keys do
      if find(data, keys[number], 1, true) then
        -- An object may stand on several lines of one event.
        local plain = events and gsub(data, "\\r?\\ndata:", "\\n") or data
        local at = look(plain, number, counts)
        if at and #plain - at < @open_max@ then
          data = plain
          keep = math.min(keep, at)
        end
      end
    end
    open = sub(data, math.max(keep, 1))
    if counts.found then
      counts.found = nil
      local text = table.concat(counts, " ")
      handle:streamInfo():dynamicMetadata():set("@metadata@", "@key@", text)
    end
  end
end
"""


def usage_filter() -> Json:
    values = {
        "@metadata@": METADATA,
        "@key@": COUNTS_KEY,
        "@counts@": ", ".join(f'"{name}"' for name in COUNTS),
        "@open_max@": str(OPEN_MAX_BYTES),
    }
    source = _LUA
    for name, value in values.items():
        source = source.replace(name, value)
    return {
        "name": "envoy.filters.http.lua",
        "typed_config": {
            "@type": TYPE + "envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": source},
        },
    }
