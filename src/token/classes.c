/* Classes of all code points, from utf8proc's tables: what the patterns of tokenizers ask about a
 * character. */
#include "token/token_int.h"

#include <stdlib.h>
#include <utf8proc.h>

static uint8_t class_of(utf8proc_int32_t c)
{
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT: return CH_LETTER | CH_UPPER;
    case UTF8PROC_CATEGORY_LL: return CH_LETTER | CH_LOWER;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO: return CH_LETTER;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME: return CH_MARK;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: return CH_NUMBER;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
    case UTF8PROC_CATEGORY_SM:
    case UTF8PROC_CATEGORY_SC:
    case UTF8PROC_CATEGORY_SK:
    case UTF8PROC_CATEGORY_SO: return CH_SIGN;
    default: return 0;
    }
}

int classes_make(uint8_t **out, struct err *e)
{
    /* White_Space, which is not a general category. */
    static const uint32_t spaces[][2] = {{0x09, 0x0D},     {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},
                                         {0x1680, 0x1680}, {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F},
                                         {0x205F, 0x205F}, {0x3000, 0x3000}};
    TRY(mem_array((void **)out, N_CODE_POINTS, 1, e));
    for (int32_t c = 0; c < 0x40000; c++) /* planes 4 to 13 and the private ones have no letters, numbers or signs */
        (*out)[c] = class_of(c);
    for (int32_t c = 0xE0000; c < 0xE1000; c++)
        (*out)[c] = class_of(c);
    for (int i = 0; i < countof(spaces); i++)
        for (uint32_t c = spaces[i][0]; c <= spaces[i][1]; c++)
            (*out)[c] |= CH_SPACE;
    (*out)['\n'] |= CH_NEWLINE;
    (*out)['\r'] |= CH_NEWLINE;
    return ST_OK;
}
