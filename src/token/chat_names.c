/* The chat templates that go by name, in the form of a template file, and how their Jinja texts are recognised. */
#include "token/chat_int.h"

#include <string.h>

const struct chat_named chat_named[] = {
    {"chatml", "system = \"<|im_start|>system\\n{content}<|im_end|>\\n\"\n"
               "user = \"<|im_start|>user\\n{content}<|im_end|>\\n\"\n"
               "assistant = \"<|im_start|>assistant\\n{content}<|im_end|>\\n\"\n"
               "tool = \"<|im_start|>tool\\n{content}<|im_end|>\\n\"\n"
               "stop = \"<|im_end|>\"\n"},
    {"qwen2.5", "system = \"<|im_start|>system\\n{content}<|im_end|>\\n\"\n"
                "user = \"<|im_start|>user\\n{content}<|im_end|>\\n\"\n"
                "assistant = \"<|im_start|>assistant\\n{content}<|im_end|>\\n\"\n"
                "default_system = \"You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\"\n"
                "stop = \"<|im_end|>\"\n"},
    {"llama2", "user = \"<s>[INST] {content} [/INST]\"\n"
               "system_user = \"<s>[INST] <<SYS>>\\n{system}\\n<</SYS>>\\n\\n{content} [/INST]\"\n"
               "assistant = \" {content} </s>\"\n"
               "generation = \"\"\n"
               "stop = \"</s>\"\ntrim = on\nalternate = on\n"},
    {"llama3", "begin = \"<|begin_of_text|>\"\n"
               "system = \"<|start_header_id|>system<|end_header_id|>\\n\\n{content}<|eot_id|>\"\n"
               "user = \"<|start_header_id|>user<|end_header_id|>\\n\\n{content}<|eot_id|>\"\n"
               "assistant = \"<|start_header_id|>assistant<|end_header_id|>\\n\\n{content}<|eot_id|>\"\n"
               "tool = \"<|start_header_id|>tool<|end_header_id|>\\n\\n{content}<|eot_id|>\"\n"
               "stop = \"<|eot_id|>\"\ntrim = on\n"},
    {"mistral", "begin = \"<s>\"\n"
                "user = \" [INST] {content} [/INST]\"\n"
                "system_user = \" [INST] {system}\\n\\n{content} [/INST]\"\n"
                "assistant = \" {content}</s>\"\n"
                "generation = \"\"\n"
                "stop = \"</s>\"\nalternate = on\n"},
    {"mistral-tekken", "begin = \"<s>\"\n"
                       "system = \"[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]\"\n"
                       "user = \"[INST]{content}[/INST]\"\n"
                       "assistant = \"{content}</s>\"\n"
                       "stop = \"</s>\"\nalternate = on\n"},
    {"gemma", "begin = \"<bos>\"\n"
              "user = \"<start_of_turn>user\\n{content}<end_of_turn>\\n\"\n"
              "system_user = \"<start_of_turn>user\\n{system}\\n\\n{content}<end_of_turn>\\n\"\n"
              "assistant = \"<start_of_turn>model\\n{content}<end_of_turn>\\n\"\n"
              "stop = \"<end_of_turn>\"\ntrim = on\nalternate = on\n"},
    {"zephyr", "system = \"<|system|>\\n{content}</s>\\n\"\n"
               "user = \"<|user|>\\n{content}</s>\\n\"\n"
               "assistant = \"<|assistant|>\\n{content}</s>\\n\"\n"
               "stop = \"</s>\"\n"},
    {"deepseek", "begin = \"<\xef\xbd\x9c"
                 "begin\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>\"\n"
                 "system = \"{content}\"\n"
                 "user = \"<\xef\xbd\x9cUser\xef\xbd\x9c>{content}\"\n"
                 "assistant = \"<\xef\xbd\x9c"
                 "Assistant\xef\xbd\x9c>{content}<\xef\xbd\x9c"
                 "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>\"\n"
                 "stop = \"<\xef\xbd\x9c"
                 "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>\"\n"},
    {"phi3", "system = \"<|system|>\\n{content}<|end|>\\n\"\n"
             "user = \"<|user|>\\n{content}<|end|>\\n\"\n"
             "assistant = \"<|assistant|>\\n{content}<|end|>\\n\"\n"
             "stop = \"<|end|>\"\n"},
    {"granite", "system = \"<|start_of_role|>system<|end_of_role|>{content}<|end_of_text|>\\n\"\n"
                "user = \"<|start_of_role|>user<|end_of_role|>{content}<|end_of_text|>\\n\"\n"
                "assistant = \"<|start_of_role|>assistant<|end_of_role|>{content}<|end_of_text|>\\n\"\n"
                "stop = \"<|end_of_text|>\"\n"},
};
const int chat_n_named = countof(chat_named);

const char *chat_names_list(void)
{
    return "chatml, qwen2.5, llama2, llama3, mistral, mistral-tekken, gemma, zephyr, deepseek, phi3, granite";
}

bool chat_template_known(const char *name)
{
    for (int i = 0; i < chat_n_named; i++)
        if (strcmp(chat_named[i].name, name) == 0)
            return true;
    return strcmp(name, "auto") == 0;
}

/* A row fits where all of `has` occur and none of `lacks` does; where one of those occurs, the template only looks like
 * it. The first row that fits is taken. */
static const struct {
    const char *name, *has[3], *lacks[3];
} marks[] = {
    {"qwen2.5", {"<|im_start|>", "You are Qwen, created by Alibaba Cloud"}, {"think"}},
    {"chatml", {"<|im_start|>", "<|im_end|>"}, {"think", "<|im_sep|>", "You are"}},
    {"llama3", {"<|start_header_id|>", "<|eot_id|>"}, {"Cutting Knowledge Date", "think"}},
    {"deepseek",
     {"<\xef\xbd\x9c"
      "Assistant\xef\xbd\x9c>"},
     {"think"}},
    {"gemma", {"<start_of_turn>", "<end_of_turn>"}, {"think"}},
    {"llama2", {"[INST]", "<<SYS>>"}, {"### "}},
    {"mistral-tekken", {"[SYSTEM_PROMPT]", "[INST]"}, {"[THINK]"}},
    {"mistral", {" [INST] ", " [/INST]"}, {"[AVAILABLE_TOOLS]"}},
    {"phi3", {"<|end|>", "<|user|>"}, {"think", "<|tool|>"}},
    {"phi3", {"<|end|>", "message['role']"}, {"think", "<|tool|>", "<|im_"}},
    {"zephyr", {"<|user|>", "<|assistant|>", "eos_token"}, {"bos_token", "<|end|>"}},
    {"granite", {"<|start_of_role|>", "<|end_of_role|>"}, {"think", "Knowledge Cutoff", "You are"}},
};

const char *chat_template_recognise(const char *jinja, const char **like)
{
    *like = NULL;
    for (int i = 0; i < countof(marks); i++) {
        bool has = true, lacks = true;
        for (int k = 0; k < countof(marks[i].has) && marks[i].has[k] != NULL; k++)
            has = has && strstr(jinja, marks[i].has[k]) != NULL;
        for (int k = 0; k < countof(marks[i].lacks) && marks[i].lacks[k] != NULL; k++)
            lacks = lacks && strstr(jinja, marks[i].lacks[k]) == NULL;
        if (has && lacks)
            return marks[i].name;
        if (has && *like == NULL)
            *like = marks[i].name;
    }
    return NULL;
}
