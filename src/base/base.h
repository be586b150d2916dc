/* Everything base/ offers, in one include. base knows no machine learning. */
#ifndef BRAID_BASE_H
#define BRAID_BASE_H

#include "base/err.h"
#include "base/file.h"
#include "base/lock.h"
#include "base/mem.h"
#include "base/philox.h"
#include "base/sha256.h"
#include "base/str.h"

#endif
