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

OBJECT_MAX_BYTES = 4096
"""Longest such object that is recognised when it comes in pieces."""

COUNTS_KEY = "counts"
"""In the request's metadata: the numbers of ``COUNTS`` as the engine wrote them, a space between
each, empty where there was none. One text is cheaper for Envoy to keep than a value for each."""

COUNTS = (
    ("usage", ("prompt_tokens", "completion_tokens")),
    ("timings", ("prompt_n", "cache_n", "predicted_n", "predicted_ms")),
)

_LUA = """
-- What lives long here is small, and what a chunk leaves dies at once: collecting half as often as
-- by default saves 1 % of a request.
collectgarbage("setpause", 400)
local find, match, sub, gsub, byte = string.find, string.match, string.sub, string.gsub, string.byte
-- A key is searched from a letter that is rare in text, for the search stops at each such letter.
local keys = {
  {before = '"', rest = 'usage"', first = 1, names = {@usage@}},
  {before = '"ti', rest = 'mings"', first = 3, names = {@timings@}},
}
local longest_key = 9

-- The last complete object of a key in data, whose rest was found from at to last, and where one
-- begins that is not complete.
local function look(data, key, at, last)
  local object
  while at do
    local from = last + 1
    local begin = at - #key.before
    if begin > 0 and sub(data, begin, at - 1) == key.before then
      local text, after = match(data, "^%s*:%s*(%b{})()", from)
      if text then
        object = text
        from = after
      elseif find(data, "^%s*:?%s*$", from) or find(data, "^%s*:%s*{", from) then
        return object, begin
      end
    end
    at, last = find(data, key.rest, from, true)
  end
  return object
end

-- Takes the counts out of a key's object. A pattern that is searched for would be tried at each
-- character, so names are found as they are.
local function take(object, key, counts)
  for i, name in ipairs(key.names) do
    local _, last = find(object, name, 1, true)
    local number = last and match(object, "^%s*:%s*([%d.eE+-]+)", last + 1)
    if number and #number < 32 then counts[key.first + i - 1] = number end
  end
end

-- Takes all counts out of data. Returns what the next chunk may go on with, and if there were any.
local function scan(data, events, counts)
  local keep = #data - longest_key + 2
  local found = false
  for number = 1, 2 do
    local key = keys[number]
    local plain = data
    local at, last = find(data, key.rest, 1, true)
    if at and events then
      -- An object may stand on several lines of one event.
      plain = gsub(data, "\\r?\\ndata:", "\\n")
      at, last = find(plain, key.rest, 1, true)
    end
    if at then
      local object, begin = look(plain, key, at, last)
      if object then
        take(object, key, counts)
        found = true
      end
      if begin and #plain - begin < @object_max@ then
        data = plain
        keep = math.min(keep, begin)
      end
    end
  end
  -- No key and no object goes beyond the end of an event.
  if events and sub(data, -2) == "\\n\\n" then return "", found end
  return sub(data, math.max(keep, 1)), found
end

function envoy_on_response(handle)
  local counts = {"", "", "", "", "", ""}
  local open, events = "", nil
  for chunk in handle:bodyChunks() do
    local length = chunk:length()
    -- The last chunk is empty as a rule.
    if length > 0 then
      local data = chunk:getBytes(0, length)
      -- A whole answer is one object; anything else is treated as events.
      if events == nil then events = byte(data) ~= 123 end
      local found
      open, found = scan(open .. data, events, counts)
      if found then
        local text = table.concat(counts, " ")
        handle:streamInfo():dynamicMetadata():set("@metadata@", "@key@", text)
      end
    end
  end
end
"""


def usage_filter() -> Json:
    values = {
        "@metadata@": METADATA,
        "@key@": COUNTS_KEY,
        **{f"@{key}@": ", ".join(f"'\"{name}\"'" for name in names) for key, names in COUNTS},
        "@object_max@": str(OBJECT_MAX_BYTES),
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
