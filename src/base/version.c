/* The version line of reports and `braid --version`; the Makefile gives the commit. */
#include "base/version.h"

#ifdef BRAID_COMMIT
#define COMMIT "commit " BRAID_COMMIT ", "
#else
#define COMMIT ""
#endif
#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif
#ifdef BRAID_CUDA
#define DEVICES "CPU and CUDA"
#else
#define DEVICES "CPU only"
#endif

const char *version_text(void) { return "0.2 (" COMMIT COMPILER ", " DEVICES ")"; }
