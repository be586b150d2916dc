/* braid bench generate: how fast a model with random weights reads a prompt and continues it, several sequences side by
 * side. */
#include "cmd/cmd.h"
#include "ops/opbench.h"

#include <stdlib.h>
#include <string.h>

struct generate_bench {
    struct config c;
    struct dev dev;
    struct generator g;
    struct candidate *scratch;
    int32_t *ids;            /* [batch, prompt], then the next token of each sequence */
    double *step, *sampling; /* seconds of each */
    int64_t prompt, n;
    double prefill;
    const char *json;
};

/* The likeliest token of each sequence. */
static void sample(struct generate_bench *b, const struct tensor *logits)
{
    int64_t vocab = b->c.model.vocab;
#pragma omp parallel for schedule(dynamic, 1) if (b->g.batch > 1)
    for (int64_t k = 0; k < b->g.batch; k++) {
        struct tensor row = tensor_rows(logits, k, 1);
        b->ids[k] = sample_token(&(struct sampler){.top_p = 1}, &row, vocab, 0, b->scratch);
    }
}

/* n tokens after the prompt. The logits are in host memory when a feed returns, so its time is complete. */
static int one_round(struct generate_bench *b, int64_t n, struct err *e)
{
    struct tensor logits;
    for (int64_t i = 0; i < b->g.batch * b->prompt; i++)
        b->ids[i] = (int32_t)rng_below(rng_key(1, "prompt"), (uint64_t)i, (uint64_t)b->c.model.vocab);
    generator_rewind(&b->g);
    double begin = time_now();
    TRY(generator_feed(&b->g, b->ids, b->prompt, &logits, e));
    b->prefill = time_now() - begin;
    for (int64_t i = 0; i < n; i++) {
        begin = time_now();
        sample(b, &logits);
        double sampled = time_now();
        TRY(generator_feed(&b->g, b->ids, 1, &logits, e));
        b->sampling[i] = sampled - begin;
        b->step[i] = time_now() - sampled;
    }
    return ST_OK;
}

/* Bytes that the ops of one token's plan read and write, each tensor once: weights and whole caches are nearly all. */
static double bytes_of_step(const struct generator *g)
{
    const struct graph *graph = &g->plans[g->n_plans - 1].g;
    double bytes = 0;
    for (int i = 0; i < graph->n_nodes; i++)
        bytes += graph->nodes[i].phase[PH_FWD].bytes;
    return bytes;
}

static int report(struct generate_bench *b, struct err *e)
{
    struct roofline r;
    TRY(roofline_measure(&b->dev, &r, e));
    double step = bench_median(b->step, b->n), sampling = bench_median(b->sampling, b->n), bytes = bytes_of_step(&b->g);
    double read = (double)(b->g.batch * b->prompt) / b->prefill, made = (double)b->g.batch / (step + sampling);
    int64_t memory = memory_total(&b->g.model->mem, b->g.model->mem.allocated, false);
    printf("device: %s\nparameters: %lld\nmemory_gib: %.2f\nsequences: %lld\nprompt_tokens: %lld\n"
           "prefill_ms: %.3f\nprefill_tokens_per_second: %.1f\n"
           "step_ms: %.4f (best %.4f, median of %lld: one more token of each sequence)\nsampling_ms: %.4f (on the "
           "host)\ntokens_per_second: %.1f\n"
           "bytes_per_step: %.4g (weights, caches of %lld tokens, activations; all experts)\n"
           "gb_per_second: %.1f\npercent_of_copy: %.1f\ncopy_gb_per_second: %.1f (measured)\n",
           b->dev.name, (long long)param_table_elems(&b->g.model->params), (double)memory / (1 << 30),
           (long long)b->g.batch, (long long)b->prompt, b->prefill * 1e3, read, step * 1e3, b->step[0] * 1e3,
           (long long)b->n, sampling * 1e3, made, bytes, (long long)b->g.cache_len, bytes / step * 1e-9,
           100 * bytes / step / r.bytes_per_s, r.bytes_per_s * 1e-9);
    if (b->json == NULL)
        return ST_OK;
    struct buf out;
    buf_init(&out, 0);
    buf_addf(&out,
             "{\"device\":\"%s\",\"pattern\":\"%s\",\"parameters\":%lld,\"memory_bytes\":%lld,\"sequences\":%lld,"
             "\"prompt_tokens\":%lld,\"prefill_ms\":%.4f,\"step_ms\":%.5f,\"best_ms\":%.5f,\"sampling_ms\":%.5f,"
             "\"tokens_per_second\":%.2f,\"bytes_per_step\":%.6g,\"copy_bytes_per_second\":%.6g}\n",
             b->dev.name, b->c.model.pattern, (long long)param_table_elems(&b->g.model->params), (long long)memory,
             (long long)b->g.batch, (long long)b->prompt, b->prefill * 1e3, step * 1e3, b->step[0] * 1e3,
             sampling * 1e3, made, bytes, r.bytes_per_s);
    int st = buf_check(&out, e);
    if (st == ST_OK)
        st = file_write_atomic(b->json, out.text, out.len, e);
    buf_release(&out);
    return st;
}

static int prepare(struct generate_bench *b, int argc, char **argv, struct err *e)
{
    enum { PROMPT, JSON };
    struct config_extra x[] = {[PROMPT] = {.name = "prompt"}, [JSON] = {.name = "json"}};
    struct config_args args = {.extra = x, .n_extra = countof(x)};
    TRY(cmd_config(&b->c, argc, argv, &args, e));
    TRY(cmd_words(&args, 0, e));
    TRY(cmd_finish(&b->c, e));
    TRY(cmd_refuse_weights(&b->c, "braid bench", e));
    cmd_say_unread(&b->c, "bench generate");
    b->prompt = 512;
    if (x[PROMPT].value != NULL && (!parse_i64(x[PROMPT].value, &b->prompt) || b->prompt < 1 || b->prompt > 1 << 24))
        return err_set(e, ST_USAGE, "--prompt=%s is not a number of tokens from 1 to 16777216", x[PROMPT].value);
    b->json = x[JSON].value;
    b->n = b->c.generate.tokens;
    struct generator_size size = {.batch = b->c.generate.batch, .tokens = b->prompt + b->n};
    TRY(mem_array((void **)&b->scratch, (size_t)b->c.model.vocab, sizeof *b->scratch, e));
    TRY(mem_array((void **)&b->ids, (size_t)(size.batch * b->prompt), sizeof *b->ids, e));
    TRY(mem_array((void **)&b->step, (size_t)b->n, sizeof *b->step, e));
    TRY(mem_array((void **)&b->sampling, (size_t)b->n, sizeof *b->sampling, e));
    TRY(device_open(&b->dev, &b->c, e));
    return generator_open(&b->g, &b->c, &b->dev, NULL, size, e);
}

int bench_generate(int argc, char **argv, struct err *e)
{
    enum { WARM = 3 }; /* on a GPU: plans run step by step, are captured, are replayed */
    struct generate_bench b = {0};
    int st = prepare(&b, argc, argv, e);
    for (int i = 0; i < WARM && st == ST_OK; i++)
        st = one_round(&b, min_i64(b.n, WARM), e);
    if (st == ST_OK)
        st = one_round(&b, b.n, e);
    if (st == ST_OK)
        st = report(&b, e);
    generator_close(&b.g);
    dev_close(&b.dev);
    config_release(&b.c);
    free(b.scratch);
    free(b.ids);
    free(b.step);
    free(b.sampling);
    return st;
}
