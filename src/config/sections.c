/* The sections of the option table (options.c), and how a row is found in it. */
#include "config/config_int.h"

#include <string.h>

const struct section config_sections[] = {
    {"model", "What is trained. A checkpoint stores these options and fixes all but dropout."},
    {"train", "How it is trained: batch, learning rate, optimizer, evaluation."},
    {"data", "What it is trained on."},
    {"run", "Where it runs and what it writes."},
    {"plan", "Memory against time, and debugging of the schedule."},
    {"optim", "Where the state of the optimizer is kept."},
    {"mhc", "Hyper-connections: how they are run."},
    {"gpu", "How a GPU is used, with run.device=cuda."},
    {"parallel", "Many ranks: how a run is distributed over them."},
    {"lora", "Fine-tuning of low-rank adapters beside frozen weights."},
    {"generate", "Text generation."},
};
const int config_n_sections = countof(config_sections);

const struct option *option_find(const char *name)
{
    for (int i = 0; i < config_n_options; i++)
        if (strcmp(config_options[i].name, name) == 0)
            return &config_options[i];
    return NULL;
}

int option_index(const struct option *o) { return (int)(o - config_options); }

size_t option_section_len(const struct option *o) { return strcspn(o->name, "."); }

int config_option_count(void) { return config_n_options; }

const char *config_option_name(int i) { return i >= 0 && i < config_n_options ? config_options[i].name : NULL; }

bool config_has_section(const char *section)
{
    if (strcmp(section, GROUP_SECTION) == 0)
        return true;
    for (int i = 0; i < config_n_sections; i++)
        if (strcmp(config_sections[i].name, section) == 0)
            return true;
    return false;
}
