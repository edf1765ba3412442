/* loadgen: closed-loop load on one OpenAI-compatible endpoint, with next to no CPU of its own.
 *
 *   loadgen HOST PORT PATH BODY_FILE [--streams N] [--warmup S] [--seconds S] [--drain S] [--header "Name: value"]
 *           [--every S] [--ramp S] [--read-bytes N --read-every S]
 *
 * N connections, kept alive. Each sends the body, reads the whole answer and begins again, through `warmup`
 * and `seconds`; then open answers are read to their end, for `drain` seconds at most. A stream that failed
 * pauses 100 ms, as a client would. One epoll loop; understands Content-Length, chunked bodies and bodies
 * that end with their connection.
 *
 * --every: a stream begins a request no sooner than S after its last one, so N / S requests a second are asked
 * for. --ramp: the streams begin one after another over S seconds (with --every, over that time by default).
 * --read-bytes, --read-every: slow readers, which take N bytes every S seconds, with a receive buffer of 4 KiB.
 *
 * It asks for real-time priority, as if it had a machine of its own. Engine cores poll: where they take every core,
 * a client of ordinary priority measures its own waiting (84 ms to the first token instead of 4, on two cores).
 *
 * Of a streamed answer it counts "data:" lines: each is one event. The event that only opens a chat message
 * (a role and no text) and the last one ([DONE]) carry no token and are not counted. A stream without [DONE]
 * is truncated: a failed request, as is one with an error event, a status other than 200, or a lost connection.
 *
 * SIGTERM and SIGINT end the measured time early. Prints one JSON object. Measured time is what follows the warm-up. ttft and latency are of the good requests
 * that began in it, itl and events of what arrived in it; failures, statuses and names in _all are of the whole run.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 65536, HEAD_BYTES = 16384, LINE_BYTES = 1024, STATUSES = 600 };

static const double PAUSE_S = 0.1;

typedef enum { PAUSED, SENDING, HEAD, BODY, ENDED } Phase;
typedef enum { CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER } ChunkPhase;
typedef enum { REFUSED, CLOSED, STATUS, TRUNCATED, ERROR_EVENT, UNFINISHED, FAILURES } Failure;

static const char *const FAILURE_NAMES[FAILURES] = {"refused",   "closed",      "status",
                                                    "truncated", "error_event", "unfinished"};

typedef struct {
    int status;
    bool event_stream, chunked, until_close, close_after; /* from the head */
    bool done, error;                                     /* [DONE], an error event */
    ChunkPhase chunk;
    long long left; /* bytes of the body, or of the chunk, still to come */
    long events;
    double first_at, last_at; /* of counted events */
    size_t line_len, head_len;
    char line[LINE_BYTES]; /* of an event stream, as far as it came; cut off at this length */
    char head[HEAD_BYTES]; /* the answer's head; then each line of framing between chunks */
} Answer;

typedef struct {
    int fd; /* -1: not connected */
    Phase phase;
    size_t sent;
    double began_at;
    Answer answer;
} Stream;

typedef struct {
    double *values;
    size_t count, room;
} Samples;

static struct {
    const char *host, *path, *body_file, *headers;
    int port, streams;
    double warmup_s, seconds, drain_s, every_s, ramp_s, read_every_s;
    size_t read_bytes;
} options = {.headers = "", .streams = 1, .warmup_s = 2, .seconds = 10, .drain_s = 60, .read_bytes = READ_BYTES};

static struct {
    Samples ttft, itl, latency;
    long requests, requests_all, events, events_all, good_events_all, bytes_all;
    long failures[FAILURES], statuses[STATUSES];
    double last_event_at, longest_silence_s;
} counted;

static struct sockaddr_in server;
static char *request;
static size_t request_len;
static int poller, ended;
static Stream *streams;
static double *due; /* of each stream: when it begins its next request, or reads again; else infinite */
static double next_due = INFINITY;
static double measure_at, stop_at;
static volatile sig_atomic_t told_to_stop;
static bool real_time;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

/* -- what is counted */

static void add(Samples *samples, double value) {
    if (samples->count == samples->room) {
        samples->room = samples->room ? 2 * samples->room : 4096;
        samples->values = realloc(samples->values, samples->room * sizeof(double));
        if (!samples->values) die("memory");
    }
    samples->values[samples->count++] = value;
}

static bool measured(double at) { return at >= measure_at && at < stop_at; }

static void count_event(Stream *stream, double at) {
    Answer *answer = &stream->answer;
    counted.events_all++;
    if (measured(at)) {
        counted.events++;
        if (answer->events) add(&counted.itl, at - answer->last_at);
        double since = counted.last_event_at > measure_at ? counted.last_event_at : measure_at;
        if (at - since > counted.longest_silence_s) counted.longest_silence_s = at - since;
    }
    if (!answer->events++) answer->first_at = at;
    answer->last_at = counted.last_event_at = at;
}

static void count_good(const Stream *stream, double at) {
    counted.requests_all++;
    counted.good_events_all += stream->answer.events;
    if (!measured(stream->began_at)) return;
    counted.requests++;
    add(&counted.latency, at - stream->began_at);
    if (stream->answer.events) add(&counted.ttft, stream->answer.first_at - stream->began_at);
}

/* -- a stream's life: begin, send, receive, end */

static void watch(Stream *stream, int operation, unsigned events) {
    struct epoll_event event = {.events = events, .data.ptr = stream};
    if (epoll_ctl(poller, operation, stream->fd, &event)) die("epoll_ctl");
}

static void hang_up(Stream *stream) {
    if (stream->fd >= 0) close(stream->fd);
    stream->fd = -1;
}

static void wake_at(const Stream *stream, double at) {
    due[stream - streams] = at;
    if (at < next_due) next_due = at;
}

static void pause_until(Stream *stream, double at) {
    stream->phase = PAUSED;
    wake_at(stream, at < stop_at ? at : stop_at);
}

static void pause_after(Stream *stream, Failure failure) {
    counted.failures[failure]++;
    hang_up(stream);
    pause_until(stream, now_s() + PAUSE_S);
}

static void dial(Stream *stream) {
    int one = 1, small = 4096;
    stream->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (stream->fd < 0) die("socket");
    setsockopt(stream->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (options.read_every_s > 0) setsockopt(stream->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    if (connect(stream->fd, (struct sockaddr *)&server, sizeof server) && errno != EINPROGRESS) {
        hang_up(stream);
        return;
    }
    watch(stream, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
}

static void begin(Stream *stream) {
    double at = now_s();
    if (at >= stop_at) {
        hang_up(stream);
        stream->phase = ENDED;
        ended++;
        return;
    }
    memset(&stream->answer, 0, offsetof(Answer, line));
    stream->began_at = at;
    stream->sent = 0;
    stream->phase = SENDING;
    if (stream->fd >= 0)
        watch(stream, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    else
        dial(stream);
    if (stream->fd < 0) pause_after(stream, REFUSED);
}

static void finish(Stream *stream, double at) {
    Answer *answer = &stream->answer;
    if (answer->status >= 0 && answer->status < STATUSES) counted.statuses[answer->status]++;
    if (answer->status != 200)
        pause_after(stream, STATUS);
    else if (answer->error)
        pause_after(stream, ERROR_EVENT);
    else if (answer->event_stream && !answer->done)
        pause_after(stream, TRUNCATED);
    else {
        count_good(stream, at);
        if (answer->close_after || answer->until_close) hang_up(stream);
        if (stream->began_at + options.every_s > at)
            pause_until(stream, stream->began_at + options.every_s);
        else
            begin(stream);
    }
}

static void connection_ended(Stream *stream, double at) {
    if (stream->phase == SENDING && !stream->sent)
        pause_after(stream, REFUSED);
    else if (stream->phase == BODY && stream->answer.until_close)
        finish(stream, at);
    else if (stream->phase == BODY && stream->answer.event_stream)
        pause_after(stream, TRUNCATED);
    else
        pause_after(stream, CLOSED);
}

static void send_more(Stream *stream) {
    ssize_t wrote = write(stream->fd, request + stream->sent, request_len - stream->sent);
    if (wrote < 0) {
        if (errno != EAGAIN) connection_ended(stream, now_s());
        return;
    }
    stream->sent += (size_t)wrote;
    if (stream->sent < request_len) return;
    stream->phase = HEAD;
    bool slow = options.read_every_s > 0; /* reads by the clock */
    watch(stream, EPOLL_CTL_MOD, slow ? 0 : EPOLLIN);
    if (slow) wake_at(stream, now_s() + options.read_every_s);
}

/* -- the answer's head and body */

static bool has(const char *text, const char *part) { return strstr(text, part) != NULL; }

static bool opens_message(const char *line) {
    return has(line, "\"role\"") && (has(line, "\"content\":\"\"") || has(line, "\"content\": \"\""));
}

static void on_line(Stream *stream, double at) {
    Answer *answer = &stream->answer;
    if (strncmp(answer->line, "data:", 5)) return;
    const char *data = answer->line + 5 + strspn(answer->line + 5, " ");
    if (!strncmp(data, "[DONE]", 6))
        answer->done = true;
    else if (!strncmp(data, "{\"error\"", 8))
        answer->error = true;
    else if (answer->events || !opens_message(data))
        count_event(stream, at);
}

static void on_body(Stream *stream, const char *bytes, size_t count, double at) {
    Answer *answer = &stream->answer;
    if (!answer->event_stream) return;
    for (const char *end = bytes + count; bytes < end;) {
        const char *newline = memchr(bytes, '\n', (size_t)(end - bytes));
        size_t part = (size_t)((newline ? newline : end) - bytes);
        size_t room = LINE_BYTES - 1 - answer->line_len;
        size_t kept = part < room ? part : room;
        memcpy(answer->line + answer->line_len, bytes, kept);
        answer->line_len += kept;
        bytes += part;
        if (!newline) return;
        answer->line[answer->line_len] = 0;
        on_line(stream, at);
        answer->line_len = 0;
        bytes++;
    }
}

/* Takes one byte of the framing between the data of two chunks. True at the end of the body. */
static bool on_framing(Answer *answer, char byte) {
    bool line_ends = byte == '\n', empty = answer->head_len == 0;
    if (!line_ends) {
        if (byte != '\r' && answer->head_len < HEAD_BYTES - 1) answer->head[answer->head_len++] = byte;
        return false;
    }
    answer->head[answer->head_len] = 0;
    answer->head_len = 0;
    if (answer->chunk == TRAILER) return empty;
    if (answer->chunk == CHUNK_END) {
        answer->chunk = CHUNK_SIZE;
        return false;
    }
    answer->left = strtoll(answer->head, NULL, 16);
    answer->chunk = answer->left ? CHUNK_DATA : TRAILER;
    return false;
}

static bool on_chunked(Stream *stream, const char *bytes, size_t count, double at) {
    Answer *answer = &stream->answer;
    for (const char *end = bytes + count; bytes < end;) {
        if (answer->chunk != CHUNK_DATA) {
            if (on_framing(answer, *bytes++)) return true;
            continue;
        }
        size_t part = (size_t)(end - bytes);
        if ((long long)part > answer->left) part = (size_t)answer->left;
        on_body(stream, bytes, part, at);
        bytes += part;
        answer->left -= (long long)part;
        if (!answer->left) answer->chunk = CHUNK_END;
    }
    return false;
}

static void parse_head(Answer *answer) {
    const char *length = strcasestr(answer->head, "\r\ncontent-length:");
    answer->status = answer->head_len > 12 ? atoi(answer->head + 9) : 0;
    answer->chunked = strcasestr(answer->head, "\r\ntransfer-encoding: chunked") != NULL;
    answer->close_after = strcasestr(answer->head, "\r\nconnection: close") != NULL;
    answer->event_stream = strcasestr(answer->head, "\r\ncontent-type: text/event-stream") != NULL;
    answer->until_close = !answer->chunked && !length;
    answer->left = length ? atoll(length + strlen("\r\ncontent-length:")) : 0;
    answer->head_len = 0; /* from here on, the framing of chunks */
}

/* How many of the bytes belong to the head; afterwards the phase is BODY when it is complete. */
static size_t on_head(Stream *stream, const char *bytes, size_t count) {
    Answer *answer = &stream->answer;
    for (size_t i = 0; i < count; i++) {
        if (answer->head_len == HEAD_BYTES - 1) return i;
        answer->head[answer->head_len++] = bytes[i];
        if (bytes[i] != '\n' || answer->head_len < 4) continue;
        if (memcmp(answer->head + answer->head_len - 4, "\r\n\r\n", 4)) continue;
        answer->head[answer->head_len] = 0;
        parse_head(answer);
        stream->phase = BODY;
        return i + 1;
    }
    return count;
}

static bool is_complete(Stream *stream, const char *bytes, size_t count, double at) {
    Answer *answer = &stream->answer;
    if (answer->chunked) return on_chunked(stream, bytes, count, at);
    on_body(stream, bytes, count, at);
    if (answer->until_close) return false;
    answer->left -= (long long)count;
    return answer->left <= 0;
}

static void receive(Stream *stream) {
    static char bytes[READ_BYTES];
    ssize_t got = read(stream->fd, bytes, options.read_bytes);
    double at = now_s();
    if (got <= 0) {
        if (got == 0 || errno != EAGAIN) connection_ended(stream, at);
        return;
    }
    counted.bytes_all += got;
    size_t used = stream->phase == BODY ? 0 : on_head(stream, bytes, (size_t)got);
    if (stream->phase == BODY && is_complete(stream, bytes + used, (size_t)got - used, at)) finish(stream, at);
}

/* -- the run */

static void wake_due(void) {
    double at = now_s();
    if (at < next_due) return;
    next_due = INFINITY;
    for (int i = 0; i < options.streams; i++) {
        Stream *stream = &streams[i];
        if (due[i] <= at) {
            due[i] = INFINITY;
            if (stream->phase == PAUSED)
                begin(stream);
            else if (stream->fd >= 0)
                receive(stream);
            if (stream->phase == HEAD || stream->phase == BODY) due[i] = at + options.read_every_s;
        }
        if (due[i] < next_due) next_due = due[i];
    }
}

/* Milliseconds until something is due: rounded up, so that nothing is looked for more often than that. */
static int wait_ms(void) {
    double left_s = next_due - now_s();
    return left_s > 0.5 ? 500 : left_s > 0 ? (int)ceil(left_s * 1e3) : 0;
}

static void stop_now(void) {
    stop_at = now_s();
    for (int i = 0; i < options.streams; i++)
        if (streams[i].phase == PAUSED) wake_at(&streams[i], stop_at);
}

static void stop_early(int signum) {
    (void)signum;
    told_to_stop = 1;
}

static void run(void) {
    struct epoll_event ready[256];
    double at = now_s(), ramp_s = options.ramp_s > 0 ? options.ramp_s : options.every_s;
    for (int i = 0; i < options.streams; i++) {
        streams[i].fd = -1;
        due[i] = INFINITY;
        pause_until(&streams[i], at + ramp_s * i / options.streams);
    }
    while (ended < options.streams && now_s() < stop_at + options.drain_s) {
        wake_due();
        int count = epoll_wait(poller, ready, 256, wait_ms());
        for (int i = 0; i < count; i++) {
            Stream *stream = ready[i].data.ptr;
            if (stream->phase == SENDING && ready[i].events & EPOLLOUT) send_more(stream);
            if (stream->fd >= 0 && ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(stream);
        }
        if (told_to_stop && now_s() < stop_at) stop_now();
    }
    for (int i = 0; i < options.streams; i++)
        counted.failures[UNFINISHED] += streams[i].phase != ENDED && streams[i].phase != PAUSED;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile_ms(const Samples *sorted, double share) {
    return sorted->count ? 1e3 * sorted->values[(size_t)(share * (double)(sorted->count - 1) + 0.5)] : 0;
}

static void print_samples(const char *name, Samples *samples) {
    double sum = 0;
    if (samples->count) qsort(samples->values, samples->count, sizeof(double), ascending);
    for (size_t i = 0; i < samples->count; i++) sum += samples->values[i];
    printf("\"%s\":{\"p50\":%.3f,\"p90\":%.3f,\"p99\":%.3f,\"max\":%.3f,\"mean\":%.3f},", name,
           percentile_ms(samples, 0.5), percentile_ms(samples, 0.9), percentile_ms(samples, 0.99),
           percentile_ms(samples, 1),
           samples->count ? 1e3 * sum / (double)samples->count : 0);
}

static void print_counts(void) {
    const char *comma = "";
    printf("\"failures\":{");
    for (int i = 0; i < FAILURES; i++) printf("%s\"%s\":%ld", i ? "," : "", FAILURE_NAMES[i], counted.failures[i]);
    printf("},\"statuses\":{");
    for (int i = 0; i < STATUSES; i++) {
        if (!counted.statuses[i]) continue;
        printf("%s\"%d\":%ld", comma, i, counted.statuses[i]);
        comma = ",";
    }
    printf("},");
}

static void print_result(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu_s = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                   1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    double since = counted.last_event_at > measure_at ? counted.last_event_at : measure_at;
    if (stop_at - since > counted.longest_silence_s) counted.longest_silence_s = stop_at - since;
    printf("{\"streams\":%d,\"seconds\":%.3f,\"requests\":%ld,\"requests_all\":%ld,", options.streams, stop_at - measure_at,
           counted.requests, counted.requests_all);
    printf("\"events\":%ld,\"events_all\":%ld,\"good_events_all\":%ld,\"bytes_all\":%ld,", counted.events,
           counted.events_all, counted.good_events_all, counted.bytes_all);
    print_samples("ttft_ms", &counted.ttft);
    print_samples("itl_ms", &counted.itl);
    print_samples("latency_ms", &counted.latency);
    print_counts();
    printf("\"longest_silence_s\":%.3f,\"cpu_s\":%.3f,\"real_time\":%s}\n", counted.longest_silence_s, cpu_s,
           real_time ? "true" : "false");
}

static void take_files(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files)) return;
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

static void take_priority(void) {
    struct sched_param lowest = {.sched_priority = sched_get_priority_min(SCHED_RR)};
    real_time = sched_setscheduler(0, SCHED_RR, &lowest) == 0;
}

/* -- the command line */

static void usage(void) {
    fprintf(stderr, "usage: loadgen HOST PORT PATH BODY_FILE [--streams N] [--warmup S] [--seconds S] [--drain S] "
                    "[--header \"Name: value\"] [--every S] [--ramp S] [--read-bytes N --read-every S]\n");
    exit(2);
}

static void read_options(int count, char **words) {
    if (count < 5) usage();
    options.host = words[1];
    options.port = atoi(words[2]);
    options.path = words[3];
    options.body_file = words[4];
    for (int i = 5; i < count; i += 2) {
        const char *name = words[i], *value = i + 1 < count ? words[i + 1] : NULL;
        if (!value) usage();
        if (!strcmp(name, "--streams"))
            options.streams = atoi(value);
        else if (!strcmp(name, "--warmup"))
            options.warmup_s = atof(value);
        else if (!strcmp(name, "--seconds"))
            options.seconds = atof(value);
        else if (!strcmp(name, "--drain"))
            options.drain_s = atof(value);
        else if (!strcmp(name, "--every"))
            options.every_s = atof(value);
        else if (!strcmp(name, "--ramp"))
            options.ramp_s = atof(value);
        else if (!strcmp(name, "--read-bytes"))
            options.read_bytes = (size_t)atol(value);
        else if (!strcmp(name, "--read-every"))
            options.read_every_s = atof(value);
        else if (!strcmp(name, "--header")) {
            char *more;
            if (asprintf(&more, "%s%s\r\n", options.headers, value) < 0) die("memory");
            options.headers = more;
        } else
            usage();
    }
    if (options.streams < 1 || options.read_bytes < 1 || options.read_bytes > READ_BYTES) usage();
}

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) die(path);
    *size = (size_t)ftell(file);
    rewind(file);
    char *content = malloc(*size + 1);
    if (!content || fread(content, 1, *size, file) != *size) die(path);
    fclose(file);
    return content;
}

static void prepare_request(void) {
    size_t body_len;
    char *body = read_file(options.body_file, &body_len), *head;
    int head_len = asprintf(&head,
                            "POST %s HTTP/1.1\r\nHost: %s:%d\r\nContent-Type: application/json\r\n"
                            "Authorization: Bearer fake-key\r\n%sContent-Length: %zu\r\n\r\n",
                            options.path, options.host, options.port, options.headers, body_len);
    if (head_len < 0) die("memory");
    request_len = (size_t)head_len + body_len;
    request = realloc(head, request_len);
    if (!request) die("memory");
    memcpy(request + head_len, body, body_len);
    free(body);
}

int main(int count, char **words) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, stop_early);
    signal(SIGINT, stop_early);
    read_options(count, words);
    prepare_request();
    server.sin_family = AF_INET;
    server.sin_port = htons((unsigned short)options.port);
    if (inet_pton(AF_INET, options.host, &server.sin_addr) != 1) usage();
    poller = epoll_create1(EPOLL_CLOEXEC);
    streams = calloc((size_t)options.streams, sizeof(Stream));
    due = calloc((size_t)options.streams, sizeof(double));
    if (poller < 0 || !streams || !due) die("start");
    take_files();
    take_priority();
    measure_at = now_s() + options.warmup_s;
    stop_at = measure_at + options.seconds;
    run();
    print_result();
    return 0;
}
