/* Token counts from passing answers: an HTTP filter that Envoy loads.
 *
 * An answer is neither parsed as a whole nor held: its bytes run through a small machine that waits
 * for the keys "usage" (OpenAI) and "timings" (llama.cpp), and takes the numbers of COUNTS from the
 * object behind them, wherever the bytes are cut. In a JSON string the keys' quotes would be
 * escaped, so no text that a model writes can look like one. When an object is complete, the
 * numbers go into the request's metadata as one text, as the engine wrote them, with a space
 * between each and empty where there was none.
 *
 * Where a stream carries usage that its request did not ask for, the object is overwritten with
 * spaces: the event stays what it was without it. (llama.cpp sends it with every completion.) That
 * needs the whole object in one piece, which is how engines write their events; one that is cut is
 * left as it is.
 *
 * Nothing here allocates but one Scan for each answer, and no byte is read twice.
 * The interface is Envoy's ABI of dynamic modules, 1.40; `records.py` knows what the counts mean.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define ABI_VERSION "v0.2.0"
#define PUBLIC __attribute__((visibility("default")))

enum { NUMBERS = 6, NUMBER_MAX = 32, WORD_MAX = 24, OBJECT_MAX = 4096, CHUNKS_MAX = 64 };

static const char *const COUNTS[NUMBERS] = {
    "prompt_tokens", "completion_tokens", "prompt_n", "cache_n", "predicted_n", "predicted_ms",
};
/* Which of them belong to a key: those from FIRST[key] to before FIRST[key + 1]. */
static const char *const KEYS[] = {"usage", "timings"};
static const int FIRST[] = {0, 2, NUMBERS};

typedef enum {
  SEEK,    /* for a quote */
  KEY,     /* in a word after a quote, which may be a key */
  COLON,   /* after a key */
  OPEN,    /* after its colon */
  OBJECT,  /* in its object */
  STRING,  /* in a string of the object */
  ESCAPE,  /* after a backslash there */
  NAMED,   /* after a string that is one of COUNTS, for a colon */
  VALUE,   /* after that colon */
  NUMBER,  /* in its number */
} State;

typedef struct {
  State state;
  bool begun;  /* whether a byte has been seen */
  bool events; /* whether the answer is a stream of events: it does not begin with a brace */
  bool hide;   /* whether usage in events is to be overwritten */
  int key;     /* index in KEYS, from COLON on */
  int depth;   /* of brackets in the object */
  int name;    /* index in COUNTS, from NAMED on */
  int ended;   /* line ends in a row */
  int field;   /* bytes of "data:" that have been seen on a new line of an event */
  size_t length; /* of the object so far */
  size_t word_length;
  char word[WORD_MAX];
  size_t number_length;
  char number[NUMBER_MAX];
  char taken[NUMBERS][NUMBER_MAX];  /* from the object that is being read */
  char counts[NUMBERS][NUMBER_MAX]; /* from all that are complete; ends with a zero byte each */
} Scan;

static bool word_is(const Scan *scan, const char *name) {
  return strlen(name) == scan->word_length && memcmp(name, scan->word, scan->word_length) == 0;
}

static bool is_space(char byte) {
  return byte == ' ' || byte == '\t' || byte == '\n' || byte == '\r';
}

static bool is_of_number(char byte) {
  return (byte >= '0' && byte <= '9') || byte == '.' || byte == 'e' || byte == 'E' ||
         byte == '+' || byte == '-';
}

static void begin_word(Scan *scan, State state) {
  scan->state = state;
  scan->word_length = 0;
}

static void end_key(Scan *scan) {
  for (int key = 0; key < 2; key++) {
    if (word_is(scan, KEYS[key])) {
      scan->state = COLON;
      scan->key = key;
      scan->length = 0;
      scan->ended = 0;
      scan->field = 0;
      return;
    }
  }
  /* Whether a quote ends a word or begins one cannot be told from here: it may do both. */
  begin_word(scan, KEY);
}

static void end_string(Scan *scan) {
  scan->state = OBJECT;
  if (scan->depth != 1) return;
  for (int name = FIRST[scan->key]; name < FIRST[scan->key + 1]; name++) {
    if (word_is(scan, COUNTS[name])) {
      scan->state = NAMED;
      scan->name = name;
    }
  }
}

static void end_number(Scan *scan) {
  /* One that fills the room may have been cut. */
  if (scan->number_length && scan->number_length < NUMBER_MAX) {
    memcpy(scan->taken[scan->name], scan->number, scan->number_length);
    scan->taken[scan->name][scan->number_length] = 0;
  }
  scan->state = OBJECT;
}

static void open_object(Scan *scan) {
  scan->state = OBJECT;
  scan->depth = 1;
  memset(scan->taken, 0, sizeof scan->taken);
}

/* A byte between the tokens of an object, or of a value that is none of COUNTS. True when the
 * object is complete. */
static bool between(Scan *scan, char byte) {
  if (byte == '"') {
    begin_word(scan, STRING);
  } else if (byte == '{' || byte == '[') {
    scan->depth++;
  } else if ((byte == '}' || byte == ']') && --scan->depth == 0) {
    for (int name = FIRST[scan->key]; name < FIRST[scan->key + 1]; name++) {
      if (scan->taken[name][0]) memcpy(scan->counts[name], scan->taken[name], NUMBER_MAX);
    }
    scan->state = SEEK;
    return true;
  }
  return false;
}

/* An object may stand on several lines of one event, each of which begins with "data:"; an empty
 * line ends the event. True when the byte is part of that and not of the object. */
static bool is_of_lines(Scan *scan, char byte) {
  static const char FIELD[] = "data:";
  if (byte == '\n') {
    scan->field = 0;
    if (++scan->ended > 1 && scan->events) scan->state = SEEK;
    return true;
  }
  if (byte == '\r') return true;
  if (scan->ended && scan->events && byte == FIELD[scan->field]) {
    if (FIELD[++scan->field] == 0) scan->ended = scan->field = 0;
    return true;
  }
  scan->ended = 0;
  return false;
}

/* True when an object is complete. */
static bool step(Scan *scan, char byte) {
  if (scan->state >= COLON) {
    if (++scan->length > OBJECT_MAX) {
      scan->state = SEEK;
    } else if (scan->state != STRING && scan->state != ESCAPE && is_of_lines(scan, byte)) {
      if (scan->state == NUMBER) end_number(scan);
      return false;
    }
  }
  switch (scan->state) {
  case SEEK:
    if (byte == '"') begin_word(scan, KEY);
    return false;
  case KEY:
    if (byte == '"') {
      end_key(scan);
    } else if (scan->word_length == WORD_MAX) {
      scan->state = SEEK;
    } else {
      scan->word[scan->word_length++] = byte;
    }
    return false;
  case COLON:
  case OPEN:
    if (is_space(byte)) return false;
    if (scan->state == COLON && byte == ':') {
      scan->state = OPEN;
    } else if (scan->state == OPEN && byte == '{') {
      open_object(scan);
    } else {
      scan->state = SEEK;
      return step(scan, byte);
    }
    return false;
  case OBJECT:
    return between(scan, byte);
  case STRING:
    if (byte == '"') {
      end_string(scan);
    } else {
      if (byte == '\\') scan->state = ESCAPE;
      /* A longer word is none of COUNTS, and stays so. */
      if (scan->word_length < WORD_MAX) scan->word[scan->word_length++] = byte;
    }
    return false;
  case ESCAPE:
    scan->state = STRING;
    return false;
  case NAMED:
    if (is_space(byte)) return false;
    scan->state = byte == ':' ? VALUE : OBJECT;
    scan->number_length = 0;
    return byte == ':' ? false : between(scan, byte);
  case VALUE:
    if (is_space(byte)) return false;
    scan->state = NUMBER;
    /* fall through */
  case NUMBER:
    if (is_of_number(byte)) {
      if (scan->number_length < NUMBER_MAX) scan->number[scan->number_length++] = byte;
      return false;
    }
    end_number(scan);
    return between(scan, byte);
  }
  return false;
}

/* Overwrites a member of an object, from its key's quote to behind its value, and a comma with it. */
static void blank(char *first, char *quote, char *behind, char *end) {
  char *before = quote;
  while (before > first && is_space(before[-1])) before--;
  if (before > first && before[-1] == ',') {
    quote = before - 1;
  } else {
    char *next = behind;
    while (next < end && is_space(*next)) next++;
    /* What comes next is not known: it may be a comma, which must not stay alone. */
    if (next == end) return;
    if (*next == ',') behind = next + 1;
  }
  memset(quote, ' ', (size_t)(behind - quote));
}

/* Reads the next bytes of an answer. True when an object was completed in them. */
static bool read_bytes(Scan *scan, char *bytes, size_t length) {
  char *const first = bytes;
  char *const end = bytes + length;
  char *quote = NULL; /* where the key begins, if that is in these bytes */
  bool found = false;
  if (length && !scan->begun) {
    scan->begun = true;
    scan->events = *bytes != '{';
  }
  while (bytes < end) {
    if (scan->state == SEEK) {
      bytes = memchr(bytes, '"', (size_t)(end - bytes));
      if (!bytes) return found;
    }
    const bool complete = step(scan, *bytes);
    if (scan->state == KEY && scan->word_length == 0) quote = bytes;
    bytes++;
    if (complete && scan->key == 0 && scan->events && scan->hide && quote) {
      blank(first, quote, bytes, end);
    }
    found |= complete;
  }
  return found;
}

/* Writes all counts with a space between each; returns the length. */
static size_t write_counts(const Scan *scan, char *text) {
  char *at = text;
  for (int name = 0; name < NUMBERS; name++) {
    const size_t length = strlen(scan->counts[name]);
    if (name) *at++ = ' ';
    memcpy(at, scan->counts[name], length);
    at += length;
  }
  return (size_t)(at - text);
}

/* For tests: what a new filter makes of the bytes, cut after each `step_bytes` of them. Returns the
 * length of the text, or -1 when no object was completed. `text` has room for 6 * 33 bytes. */
PUBLIC long preheat_usage_of(char *bytes, size_t length, size_t step_bytes, bool hide, char *text) {
  Scan scan = {.hide = hide};
  bool found = false;
  for (size_t at = 0; at < length; at += step_bytes) {
    found |= read_bytes(&scan, bytes + at, length - at < step_bytes ? length - at : step_bytes);
  }
  return found ? (long)write_counts(&scan, text) : -1;
}

/* Envoy's side. Its types are opaque pointers here; numbers are those of its enumerations. */

typedef struct {
  char *bytes;
  size_t length;
} Buffer;

enum { CONTINUE = 0, RECEIVED_RESPONSE_BODY = 2, DYNAMIC_METADATA = 0 };

extern size_t envoy_dynamic_module_callback_http_get_body_chunks_size(void *filter, int body);
extern bool envoy_dynamic_module_callback_http_get_body_chunks(void *filter, int body, Buffer *all);
extern void envoy_dynamic_module_callback_http_set_dynamic_metadata_string(void *filter,
                                                                           Buffer space, Buffer key,
                                                                           Buffer value);

extern bool envoy_dynamic_module_callback_http_get_metadata_bool(void *filter, int source,
                                                                 Buffer space, Buffer key,
                                                                 bool *result);

/* For what Envoy only reads. */
static Buffer buffer(const char *text) { return (Buffer){(char *)text, strlen(text)}; }

static bool is_usage_asked_for(void *filter) {
  bool asked = false;
  return envoy_dynamic_module_callback_http_get_metadata_bool(
             filter, DYNAMIC_METADATA, buffer("preheat"), buffer("include_usage"), &asked) &&
         asked;
}

PUBLIC const char *envoy_dynamic_module_on_program_init(void) { return ABI_VERSION; }

PUBLIC const void *envoy_dynamic_module_on_http_filter_config_new(void *host, Buffer name,
                                                                  Buffer config) {
  (void)host, (void)name, (void)config;
  return COUNTS;
}

PUBLIC void envoy_dynamic_module_on_http_filter_config_destroy(const void *config) { (void)config; }

/* NULL, which Envoy answers with an error, when there is no memory. */
PUBLIC void *envoy_dynamic_module_on_http_filter_new(const void *config, void *filter) {
  (void)config, (void)filter;
  return calloc(1, sizeof(Scan));
}

PUBLIC void envoy_dynamic_module_on_http_filter_destroy(void *scan) { free(scan); }

PUBLIC int envoy_dynamic_module_on_http_filter_response_body(void *filter, void *state, bool end) {
  (void)end;
  Scan *const scan = state;
  Buffer chunks[CHUNKS_MAX];
  const size_t count =
      envoy_dynamic_module_callback_http_get_body_chunks_size(filter, RECEIVED_RESPONSE_BODY);
  Buffer *const all = count > CHUNKS_MAX ? calloc(count, sizeof *all) : chunks;
  bool found = false;
  if (!scan->begun) scan->hide = !is_usage_asked_for(filter);
  if (count && all &&
      envoy_dynamic_module_callback_http_get_body_chunks(filter, RECEIVED_RESPONSE_BODY, all)) {
    for (size_t i = 0; i < count; i++) found |= read_bytes(scan, all[i].bytes, all[i].length);
  }
  if (all != chunks) free(all);
  if (found) {
    char text[NUMBERS * (NUMBER_MAX + 1)];
    const Buffer value = {text, write_counts(scan, text)};
    envoy_dynamic_module_callback_http_set_dynamic_metadata_string(filter, buffer("preheat"),
                                                                   buffer("counts"), value);
  }
  return CONTINUE;
}

/* What else Envoy asks of every filter. */

PUBLIC int envoy_dynamic_module_on_http_filter_request_headers(void *filter, void *scan, bool end) {
  (void)filter, (void)scan, (void)end;
  return CONTINUE;
}

PUBLIC int envoy_dynamic_module_on_http_filter_request_body(void *filter, void *scan, bool end) {
  (void)filter, (void)scan, (void)end;
  return CONTINUE;
}

PUBLIC int envoy_dynamic_module_on_http_filter_request_trailers(void *filter, void *scan) {
  (void)filter, (void)scan;
  return CONTINUE;
}

PUBLIC int envoy_dynamic_module_on_http_filter_response_headers(void *filter, void *scan,
                                                                bool end) {
  (void)filter, (void)scan, (void)end;
  return CONTINUE;
}

PUBLIC int envoy_dynamic_module_on_http_filter_response_trailers(void *filter, void *scan) {
  (void)filter, (void)scan;
  return CONTINUE;
}

PUBLIC void envoy_dynamic_module_on_http_filter_stream_complete(void *filter, void *scan) {
  (void)filter, (void)scan;
}

PUBLIC void envoy_dynamic_module_on_http_filter_downstream_above_write_buffer_high_watermark(
    void *filter, void *scan) {
  (void)filter, (void)scan;
}

PUBLIC void envoy_dynamic_module_on_http_filter_downstream_below_write_buffer_low_watermark(
    void *filter, void *scan) {
  (void)filter, (void)scan;
}

/* Called for work that a filter began itself; this one begins none. */
#define NEVER_CALLED(event) \
  PUBLIC void envoy_dynamic_module_on_http_filter_##event(void) {}

NEVER_CALLED(scheduled)
NEVER_CALLED(http_callout_done)
NEVER_CALLED(http_stream_headers)
NEVER_CALLED(http_stream_data)
NEVER_CALLED(http_stream_trailers)
NEVER_CALLED(http_stream_complete)
NEVER_CALLED(http_stream_reset)
