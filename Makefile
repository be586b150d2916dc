# braid: one non-recursive makefile. `make help` lists the targets, `make found` what it found.
#
#   B=build          where objects and binaries go
#   CC=gcc|clang     compiler
#   V=1              show the commands
#   SAN=address,undefined   sanitizers (use another B with it)
#   CUDA=yes|no      kernels for NVIDIA GPUs; without a word, yes where a GPU is visible (and as $(B) was built before)

.DEFAULT_GOAL := all
B    ?= build
CC   := $(if $(filter default,$(origin CC)),gcc,$(CC))
SAN  ?=
OPT  ?= -O2
V    ?=
Q    := $(if $(V),,@)

WARN := -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes \
        -Wvla -Wwrite-strings -Wpointer-arith -Wformat=2 -Wno-format-nonliteral -Werror
# What a mistake that slips through meets: checked copies, guarded stacks, tables that are read-only before main (tests/cmd/test_hardened.sh).
HARDEN := -fstack-protector-strong $(if $(SAN),,$(if $(filter -O0,$(OPT)),,-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)) -fPIE
CFLAGS := -std=c11 -D_GNU_SOURCE -g $(OPT) $(WARN) $(HARDEN) -fopenmp -Isrc -MMD -MP $(EXTRA_CFLAGS)
LDFLAGS := -fopenmp -pie -Wl,-z,relro,-z,now,-z,noexecstack $(EXTRA_LDFLAGS)
ifneq ($(SAN),)
CFLAGS += -fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS += -fsanitize=$(SAN)
endif

# ---- what this machine has -----------------------------------------------------------------
PKG := pkg-config
have = $(shell $(PKG) --exists $(1) 2>/dev/null && echo yes || echo no)
NEEDED := openblas jansson inih libxxhash libpcre2-8 libutf8proc zlib libzstd
MISSING := $(strip $(foreach p,$(NEEDED),$(if $(filter no,$(call have,$(p))),$(p))))
PKG_CFLAGS := $(patsubst -I%,-isystem %,$(shell $(PKG) --cflags $(filter-out $(MISSING) libpcre2-8,$(NEEDED)) 2>/dev/null))
CFLAGS += $(PKG_CFLAGS)
# Only token/regex.c sees PCRE2, and only programs with tokenizers link it. Only tests need cmocka.
CFLAGS_regex := $(patsubst -I%,-isystem %,$(shell $(PKG) --cflags libpcre2-8 2>/dev/null))
CMOCKA := $(call have,cmocka)
# Small libraries are linked statically where a .a exists, so that the binary can be carried.
LIBDIR := $(shell $(PKG) --variable=libdir jansson 2>/dev/null)
static_begin := -Wl,-Bstatic
static_end := -Wl,-Bdynamic
small = $(if $(wildcard $(LIBDIR)/lib$(1).a),$(static_begin) -l$(1) $(static_end),-l$(1))
# CARRY=yes links OpenBLAS statically too: such a binary runs where only libc and libgomp are.
CARRY ?= no
BLAS := $(if $(filter yes,$(CARRY)),$(static_begin) -lopenblas $(static_end),$(shell $(PKG) --libs openblas 2>/dev/null))
LIBS := $(call small,jansson) $(call small,inih) $(call small,xxhash) $(call small,utf8proc) $(call small,z) $(call small,zstd) \
        $(BLAS) -lpthread -lm

# CUDA=yes compiles the CUDA kernels, which takes minutes and 100 MB, so it is the default only where a GPU is visible, for tests
# that need a GPU, and in a folder that was built with it before. GPU=yes or no stands in for looking at the machine. cuBLASLt and
# cuDNN are loaded at run time, so the same binary starts where they are missing. CUDA_ARCHS: 80 is the portable code, 90a adds
# Hopper's own instructions.
NVCC := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPU ?= $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),yes,no)
BUILT_WITH := $(if $(wildcard $(B)/settings-cuda),$(shell cat $(B)/settings-cuda))
ifneq ($(filter gpu-tests check-gpu gpu-set,$(MAKECMDGOALS)),)
CUDA ?= yes
else
CUDA ?= $(if $(NVCC),$(or $(patsubst CUDA=%,%,$(filter CUDA=%,$(BUILT_WITH))),$(GPU)),no)
endif
CUDA_ARCHS ?= 80 90a
ifeq ($(CUDA),yes)
ifeq ($(NVCC),)
$(error CUDA=yes, but there is no nvcc in PATH or /usr/local/cuda/bin; install the CUDA toolkit, or build for the CPU with CUDA=no)
endif
CUDA_HOME := $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
CUDA_CFLAGS := -DBRAID_CUDA -isystem $(CUDA_HOME)/include
PTX_80 := -gencode=arch=compute_80,code=compute_80
NVFLAGS = -std=c++17 -O3 -lineinfo -DBRAID_CUDA -Isrc -MMD -MP --threads 1 -Werror all-warnings \
          -Xcompiler -Wall,-Wextra,-Wno-unused-parameter,-Wno-missing-field-initializers,-fPIE $(foreach a,$(CUDA_ARCHS),-gencode=arch=compute_$(a),code=sm_$(a)) \
          $(if $(filter 80,$(CUDA_ARCHS)),$(PTX_80))
LIBS += -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lstdc++
endif

# MPI is taken in where mpicc is; MPI=no leaves it out. A binary that is to be carried (CARRY=yes) leaves it out too. Nothing of it
# is called unless ranks are started by a launcher.
MPICC := $(shell command -v mpicc 2>/dev/null)
MPI_SHOW := $(if $(MPICC),$(shell $(MPICC) -show 2>/dev/null))
MPI ?= $(if $(filter yes,$(CARRY)),no,$(if $(MPICC),yes,no))
ifeq ($(MPI),yes)
CFLAGS_world := -DBRAID_MPI
CFLAGS_mpi := $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_SHOW)))
LIBS += $(filter -L% -l% -Wl%,$(MPI_SHOW))
endif

# The commit that `braid --version` and reports name: of a released tree without git, none.
COMMIT := $(shell git describe --always --dirty --exclude='*' 2>/dev/null)
CFLAGS_version := $(if $(COMMIT),-DBRAID_COMMIT='"$(COMMIT)"')
$(B)/base/version.o: $(B)/commit
$(B)/commit: FORCE
	@mkdir -p $(@D); [ "$$(cat $@ 2>/dev/null)" = '$(COMMIT)' ] || echo '$(COMMIT)' > $@

# The server of `braid serve` is taken in where libmicrohttpd is; HTTP=no leaves it out. Debian's library asks for GnuTLS, so a
# binary that is to be carried leaves it out too. Only $(B)/braid links it.
HTTP ?= $(if $(filter yes,$(CARRY)),no,$(call have,libmicrohttpd))
ifeq ($(HTTP),yes)
CFLAGS_cmd_serve := -DBRAID_HTTP
HTTP_LIBS := $(if $(wildcard $(LIBDIR)/libmicrohttpd.a),$(call small,microhttpd) -lgnutls,-lmicrohttpd)
endif

# ---- folders, and what each may link: the include graph of ARCHITECTURE.md -------------------
FOLDERS := base kind tensor config log token data dev comm ckpt hf ops lib plan layers model optim train sim serve cmd
uses_base   :=
uses_kind   := base
uses_tensor := base
uses_config := kind base
uses_log    := config kind base
uses_token  := base
uses_data   := token tensor base
uses_dev    := tensor base
uses_comm   := dev tensor kind base
uses_ckpt   := comm dev tensor kind base
uses_hf     := ckpt comm dev config tensor kind base
uses_ops    := dev tensor base
uses_lib    := ops dev tensor base
uses_plan   := ops comm dev tensor base
uses_layers := plan ops comm dev config tensor kind base
uses_model  := layers plan ops comm dev config tensor kind base
uses_optim  := model layers plan ops comm dev config tensor kind base
uses_train  := optim model layers plan hf ckpt ops comm dev data token log config tensor kind base
uses_sim    := train $(uses_train)
uses_serve  := train $(uses_train)
uses_cmd    := serve sim train $(uses_train)

# Fast CPU ops are compiled once per instruction set; ops/ops.c picks a table at start.
ISAS := $(if $(filter x86_64,$(shell uname -m)),avx512 avx2 base,base)
isa_avx512 := -march=x86-64-v4 -mprefer-vector-width=512
isa_avx2   := -march=x86-64-v3
isa_base   :=
# No value changes by -fno-trapping-math, but without it gcc keeps loops with float selects scalar.
ISA_CFLAGS = -O3 -ffp-contract=fast -fno-trapping-math -fopenmp-simd -DISA=$(1) $(isa_$(1)) $(if $(findstring clang,$(CC)),-Wno-pass-failed)
# clang warns where a loop marked for unrolling has a variable bound: the generic copy of a kernel.

# Few C files know of CUDA; all others are the same object with and without it, so CUDA=yes after CUDA=no compiles those few and the kernels.
cuda_aware := $(shell grep -rlE 'BRAID_CUDA|comm/gpu_int\.h' --include='*.c' src)
cuda_only := src/dev/cuda.c src/dev/cublas.c src/dev/cudnn.c src/dev/cudnn_graph.c src/ops/ops_cuda.c
mpi_only := src/comm/mpi.c
http_only := src/serve/http.c
sources = $(filter-out $(if $(filter no,$(CUDA)),$(cuda_only)) $(if $(filter no,$(MPI)),$(mpi_only)) $(if $(filter no,$(HTTP)),$(http_only)),$(sort $(wildcard src/$(1)/*.c src/$(1)/*/*.c src/$(1)/*/*/*.c)))
cuda_objects = $(if $(filter yes,$(CUDA)),$(patsubst src/%.cu,$(B)/%.cu.o,$(sort $(wildcard src/$(1)/*.cu src/$(1)/*/*.cu src/$(1)/*/*/*.cu))))
isa_sources = $(filter %_cpu.c,$(call sources,$(1)))
objects = $(patsubst src/%.c,$(B)/%.o,$(filter-out $(if $(filter ops,$(1)),%_cpu.c),$(call sources,$(1)))) \
          $(call cuda_objects,$(1)) \
          $(if $(filter ops,$(1)),$(foreach i,$(ISAS),$(patsubst src/%.c,$(B)/%.$(i).o,$(call isa_sources,$(1)))))
lib = $(B)/lib$(1).a

.PHONY: all help found needs needs-tests test clean format size FORCE
all: $(B)/braid

help:
	@echo "make            build $(B)/braid (CUDA=yes, CUDA=no: with or without GPU kernels)"
	@echo "make test       build and run all tests (./check does this and more)"
	@echo "make test-X     tests of one folder, X of: $(FOLDERS)"
	@echo "make SAN=address,undefined B=build-asan test"
	@echo "make check-gpu  tests that need a GPU; make gpu-tests only builds them (CARRY=yes: to be run elsewhere)"
	@echo "make gpu-set    the same packed into one file for a machine without a compiler (CARRY=yes)"
	@echo "make check-emu  CUDA kernels on an emulator, without a GPU (tests/emu/README.md); make emu only builds it"
	@echo "make torture    failing calls, kills and power cuts; tests/torture/run runs them"
	@echo "make fuzz       fuzz targets (clang); tests/fuzz/run builds and runs them"
	@echo "make lib        $(B)/libbraidk.so, the kernels for other programs (src/lib/braidk.h); make wheel: a package for PyTorch, BINDING=yes: with native calls"
	@echo "make docs       docs/options.md from the option table"
	@echo "make found      which libraries and compilers were found"
	@echo "make size       lines by folder beside their budgets (tests/budget.txt), longest files"
	@echo "make spills     kernels whose registers spill to memory, from the CUDA build in $(B)"
	@echo "make format     clang-format over all sources; tools/format --check only looks"

needs:
	@if [ -n "$(MISSING)" ]; then echo "braid: missing libraries: $(MISSING)"; \
	  echo "  hint: tools/install-deps installs them (./demo and ./check call it); --list names the packages"; exit 1; fi

needs-tests: needs
	@if [ "$(CMOCKA)" != yes ]; then echo "braid: missing library: cmocka, which tests need and braid does not"; \
	  echo "  hint: tools/install-deps installs it; --list names the packages"; exit 1; fi

found:
	@echo "compiler $(CC); instruction sets $(ISAS)"
	@echo "CUDA: $(CUDA)$(if $(filter yes,$(CUDA)), ($(NVCC); architectures $(CUDA_ARCHS)), ($(if $(NVCC),$(NVCC); make CUDA=yes compiles the kernels,no nvcc)))"
	@echo "GPU visible: $(GPU)"
	@echo "MPI: $(MPI)$(if $(MPICC), ($(MPICC)), (no mpicc))"
	@echo "HTTP server: $(HTTP)$(if $(filter no,$(call have,libmicrohttpd)), (no libmicrohttpd))"
	@$(foreach p,$(NEEDED) cmocka,echo "$(p): $(call have,$(p))";)

# Objects of one folder belong to one setting: another compiler or sanitizer builds them anew. Only a change touches the file.
SETTINGS := CC=$(CC) MPI=$(MPI) HTTP=$(HTTP) SAN=$(SAN) OPT=$(OPT) EXTRA_CFLAGS=$(EXTRA_CFLAGS)
$(B)/settings: FORCE
	@mkdir -p $(@D); [ "$$(cat $@ 2>/dev/null)" = '$(SETTINGS)' ] || echo '$(SETTINGS)' > $@
$(B)/settings-cuda: FORCE
	@mkdir -p $(@D); [ "$$(cat $@ 2>/dev/null)" = 'CUDA=$(CUDA)' ] || echo 'CUDA=$(CUDA)' > $@
$(patsubst src/%.c,$(B)/%.o,$(cuda_aware)) $(foreach f,$(FOLDERS),$(call lib,$(f))): $(B)/settings-cuda
.PHONY: FORCE

define folder_rules
$$(call lib,$(1)): $$(call objects,$(1))
	@mkdir -p $$(@D) && rm -f $$@ && ar rcs $$@ $$(filter %.o,$$^)
endef
$(foreach f,$(FOLDERS),$(eval $(call folder_rules,$(f))))

define isa_rules
$$(B)/%.$(1).o: src/%.c $$(B)/settings | needs
	@mkdir -p $$(@D)
	$$(Q)$$(CC) $$(CFLAGS) $$(call ISA_CFLAGS,$(1)) -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call isa_rules,$(i))))

$(B)/%.o: src/%.c $(B)/settings | needs
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(CFLAGS_$(notdir $*)) $(if $(filter $<,$(cuda_aware) $(cuda_only)),$(CUDA_CFLAGS)) -c $< -o $@

$(B)/%.cu.o: src/%.cu $(B)/settings | needs
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(NVFLAGS) -Xptxas -v -c $< -o $@ >$@.log 2>&1 || { grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' $@.log >&2; exit 1; }

# Folders that walk over the layer kinds link what defines them, which they do not include.
links_kind   := layers $(uses_layers)
links_config := $(links_kind)
links_ckpt   := $(links_kind)
links_hf     := $(links_kind)
links_log    := $(links_kind)
linked = $(sort $(1) $(uses_$(1)) $(links_$(1)))
libs_for = $(foreach f,$(call linked,$(1)),$(call lib,$(f)))
# Libraries beside $(LIBS) that a folder links.
more_libs = $(if $(filter token,$(call linked,$(1))),$(call small,pcre2-8))

$(B)/braid: $(call libs_for,cmd)
	$(Q)$(CC) $(LDFLAGS) -o $@ -Wl,--start-group $^ -Wl,--end-group $(HTTP_LIBS) $(call more_libs,cmd) $(LIBS)
	$(if $(filter yes,$(CUDA)),@tools/spills --short $(B))

# ---- libbraidk.so: the kernels for other programs (src/lib/braidk.h), from the objects that $(B)/braid is made of ---------------
# The version script leaves only braidk_* visible, and with that the linker binds all other references inside the library. OpenBLAS
# is linked statically where there is an archive: then the library needs nothing but libc, libm, libpthread and libgomp.
LIB_BLAS := $(firstword $(wildcard $(addsuffix /libopenblas.a,$(shell $(PKG) --variable=libdir openblas 2>/dev/null) /usr/lib/x86_64-linux-gnu/openblas-openmp)))
LIB_STRIP := $(if $(V),,-Wl,--strip-debug)
.PHONY: lib
lib: $(B)/libbraidk.so $(B)/lib_example_cpu $(if $(filter yes,$(CUDA)),$(B)/lib_example_gpu)
$(B)/libbraidk.so: $(call libs_for,lib) src/lib/braidk.map
	$(Q)$(CC) -shared $(filter-out -pie,$(LDFLAGS)) -static-libgcc $(LIB_STRIP) -Wl,--version-script=src/lib/braidk.map -Wl,-soname,libbraidk.so \
	  -Wl,--no-undefined -o $@ $(patsubst src/%.c,$(B)/%.o,$(call sources,lib)) -Wl,--start-group $(filter-out $(B)/liblib.a,$(filter %.a,$^)) -Wl,--end-group \
	  $(call small,xxhash) $(or $(LIB_BLAS),$(BLAS)) $(if $(filter yes,$(CUDA)),-L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt) -lpthread -lm $(if $(filter yes,$(CUDA)),$(static_begin) -lstdc++ $(static_end))
$(B)/lib_example_cpu: examples/boundary_cpu.c $(B)/libbraidk.so
	$(Q)$(CC) -std=c11 -Wall -Wextra -Werror -O2 -Isrc/lib -o $@ $< $(B)/libbraidk.so -Wl,-rpath,'$$ORIGIN' -lm
$(B)/lib_example_gpu: examples/boundary_gpu.c $(B)/libbraidk.so
	$(Q)$(CC) -std=c11 -Wall -Wextra -Werror -O2 -Isrc/lib -isystem $(CUDA_HOME)/include -o $@ $< $(B)/libbraidk.so -Wl,-rpath,'$$ORIGIN' \
	  -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lpthread -lm

# The native calls of python/braid_kernels, against the stable ABI that torch has had since 2.10; headers are those of BRAID_PYTHON's torch.
BRAID_PYTHON ?= python3
TORCH_ABI := 0x020a000000000000
.PHONY: binding
binding: $(B)/libbraid_torch.so
$(B)/libbraid_torch.so: python/braid_kernels/binding.cpp
	@mkdir -p $(B)
	$(Q)torch=$$($(BRAID_PYTHON) -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2>/dev/null) && [ -f "$$torch/include/torch/csrc/stable/library.h" ] || \
	  { echo "make binding: $(BRAID_PYTHON) has no torch with the headers of its stable ABI (2.10 and later); BRAID_PYTHON names another" >&2; exit 1; }; \
	$(CXX) -std=c++17 -O2 -Wall -Wextra -Werror -shared -fPIC -fvisibility=hidden -DTORCH_TARGET_VERSION=$(TORCH_ABI) -isystem "$$torch/include" \
	  -Wl,-soname,libbraid_torch.so -o $@ $< -L"$$torch/lib" -Wl,--no-as-needed -ltorch_cpu

# A wheel of python/braid_kernels with the library inside; its platform is what auditwheel says, where that is installed. BINDING=yes: with
# the native calls as well, which are left alone by a torch before 2.10.
.PHONY: wheel
wheel: $(B)/libbraidk.so $(if $(filter yes,$(BINDING)),$(B)/libbraid_torch.so)
	@tools/wheel.py $(filter-out %_torch.so,$^) $(B)/wheel $(filter %_torch.so,$^)

# ---- tests: tests/<folder>/test_*.c links that folder and what it may use -----------------------
TEST_SRC := $(sort $(wildcard tests/*/test_*.c))
test_folder = $(word 2,$(subst /, ,$(1)))
define test_rules
$$(B)/$(1:.c=): $(1) tests/support.h $$(call libs_for,$(call test_folder,$(1))) | needs-tests
	@mkdir -p $$(@D)
	$$(Q)$$(CC) $$(CFLAGS) -Itests $$(LDFLAGS) $$(TEST_CFLAGS) -o $$@ $(1) -Wl,--start-group \
	  $$(call libs_for,$(call test_folder,$(1))) -Wl,--end-group $$(call more_libs,$(call test_folder,$(1))) $$(LIBS) -lcmocka
endef
$(foreach t,$(TEST_SRC),$(eval $(call test_rules,$(t))))

TEST_BIN := $(TEST_SRC:%.c=$(B)/%)
tests: $(TEST_BIN) $(if $(SAN),,lib)
test: $(B)/braid tests
	@tests/run $(B)
define test_folder_rules
.PHONY: test-$(1)
test-$(1): $$(filter $$(B)/tests/$(1)/%,$$(TEST_BIN))
	@for t in $$^; do $$$$t || exit 1; done
endef
$(foreach f,$(FOLDERS),$(eval $(call test_folder_rules,$(f))))

# ---- on a machine with a GPU: tests/gpu/*.c without cmocka, so that the programs can be carried there ----------
GPU_SRC := $(sort $(wildcard tests/gpu/*.c))
GPU_BIN := $(GPU_SRC:%.c=$(B)/%) $(patsubst %.cu,$(B)/%,$(sort $(wildcard tests/gpu/*.cu)))
$(B)/tests/gpu/%: tests/gpu/%.cu $(call libs_for,ops)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(NVFLAGS) -c $< -o $@.o && $(CC) $(LDFLAGS) -o $@ $@.o -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LIBS)
$(B)/tests/gpu/%: tests/gpu/%.c $(call libs_for,cmd)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(CUDA_CFLAGS) $(LDFLAGS) -o $@ $< -Wl,--start-group $(filter-out $(B)/libcmd.a,$(filter %.a,$^)) -Wl,--end-group $(call more_libs,cmd) $(LIBS)
.PHONY: gpu-tests check-gpu
gpu-tests: $(GPU_BIN)
check-gpu: $(B)/braid gpu-tests
	@tests/gpu/run $(B)
# The same for a machine that has a GPU and no compiler: one program instead of a dozen (tests/gpu/set), scripts and data, packed.
# There: tar xf gpu-set.tar.xz && gpu-set/tests/gpu/run build
GPU_SET := $(notdir $(basename $(GPU_SRC) $(wildcard tests/gpu/*.cu)))
$(B)/tests/gpu/set/%.main.o: tests/gpu/%.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(CUDA_CFLAGS) -c $< -o $@
$(B)/tests/gpu/set/%.main.o: tests/gpu/%.cu
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(NVFLAGS) -c $< -o $@
$(B)/tests/gpu/set/braid.main.o: $(B)/cmd/main.o
	@mkdir -p $(@D) && cp $< $@
$(B)/tests/gpu/set/%.o: $(B)/tests/gpu/set/%.main.o
	$(Q)objcopy --redefine-sym main=$*_main $< $@
$(B)/gpu-set/build/gpu-set: tests/gpu/set/main.c $(patsubst %,$(B)/tests/gpu/set/%.o,braid $(GPU_SET)) $(call libs_for,cmd)
	@mkdir -p $(@D)/tests/gpu $(B)/gpu-set/tests/gpu
	$(Q)$(CC) $(CFLAGS) -D'PROGRAMS=$(patsubst %,PROGRAM(%),braid $(GPU_SET))' $(LDFLAGS) -s -o $@ $(filter %.c %.o,$^) \
	  -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(HTTP_LIBS) $(call more_libs,cmd) $(LIBS)
	@ln -sf gpu-set $(@D)/braid; for p in $(GPU_SET); do ln -sf ../../gpu-set $(@D)/tests/gpu/$$p; done
$(B)/gpu-set.tar.xz: $(B)/gpu-set/build/gpu-set tests/gpu/run tests/gpu/curves.sh tests/gpu/curves.txt
	@cp tests/gpu/run tests/gpu/curves.sh tests/gpu/curves.txt $(B)/gpu-set/tests/gpu/
	@tar -C $(B) -cf - gpu-set | xz -T0 -6 >$@ && ls -l $@
.PHONY: gpu-set gpu-objects
gpu-set: $(B)/gpu-set.tar.xz
# ./check compiles them, so that a change of what they use is seen without a GPU.
gpu-objects: $(patsubst %,$(B)/tests/gpu/set/%.main.o,$(GPU_SET))

# ---- kernels without a GPU: tests/emu compiles .cu files as plain C++ and runs their threads as fibers; see its README ---------
# SAN=address,undefined (and another B) finds accesses outside of allocations, and misaligned ones.
EMU_CXX ?= g++
EMU_OPT ?= -O1
EMU_FLAGS := -std=c++17 -g1 $(EMU_OPT) -fno-strict-aliasing -fno-ipa-reference -ffp-contract=fast $(if $(shell grep -ow -m1 fma /proc/cpuinfo 2>/dev/null),-march=x86-64-v3) \
             -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-parameter -Wno-missing-field-initializers -Wno-unused-function -Wno-sign-compare -Wno-maybe-uninitialized -Wno-dangling-pointer -Wno-psabi \
             -DBRAID_CUDA -Itests/emu/include -Isrc -MMD -MP \
             $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-sanitize=vptr -fno-omit-frame-pointer)
# Calls at every memory access, which end in tests/emu/watch.cc: not in the sanitizer's library, which is not linked.
EMU_WATCH := $(if $(SAN),,-fsanitize=thread --param tsan-instrument-func-entry-exit=0)
EMU_C := src/dev/dev.c src/dev/host.c src/dev/cuda.c src/ops/ops.c src/ops/ops_cuda.c tests/emu/vendor.c
EMU_CU := $(sort $(wildcard src/ops/*/*.cu src/ops/*/*/*.cu))
EMU_OBJECTS := $(patsubst src/%,$(B)/emu/%.o,$(EMU_CU)) $(patsubst %.c,$(B)/emu/%.o,$(EMU_C:src/%=%)) \
               $(filter-out %.cu.o $(patsubst src/%.c,$(B)/%.o,$(EMU_C) $(cuda_only)),$(foreach f,ops dev tensor base,$(call objects,$(f))))
EMU_MACHINE := $(patsubst tests/emu/%,$(B)/emu/%.o,$(sort $(wildcard tests/emu/*.cc)))
EMU_BIN := $(B)/emu/check_ops $(B)/emu/check_f8 $(B)/emu/check_mhc $(B)/emu/check_mhc_rebuild $(B)/emu/check_mhc_error $(B)/emu/check_hopper $(B)/emu/bench_experts $(B)/emu/bench_experts8 $(B)/emu/bench_sparse
$(B)/emu/%.cu.o: src/%.cu | needs
	@mkdir -p $(@D)
	$(Q)$(EMU_CXX) -x c++ $(EMU_FLAGS) $(EMU_WATCH) -c $< -o $@
$(B)/emu/%.cc.o: tests/emu/%.cc | needs
	@mkdir -p $(@D)
	$(Q)$(EMU_CXX) $(EMU_FLAGS) -Itests/emu -c $< -o $@
$(B)/emu/%.o: src/%.c | needs
	@mkdir -p $(@D)
	$(Q)$(CC) -Itests/emu/include -DBRAID_CUDA $(CFLAGS) -c $< -o $@
$(B)/emu/tests/emu/%.o: tests/emu/%.c | needs
	@mkdir -p $(@D)
	$(Q)$(CC) -Itests/emu/include -DBRAID_CUDA $(CFLAGS) -c $< -o $@
$(B)/emu/%.o: tests/gpu/%.c | needs
	@mkdir -p $(@D)
	$(Q)$(CC) -Itests/emu/include -DBRAID_CUDA $(CFLAGS) -c $< -o $@
$(B)/emu/%.o: tests/gpu/%.cu | needs
	@mkdir -p $(@D)
	$(Q)$(EMU_CXX) -x c++ $(EMU_FLAGS) $(EMU_WATCH) -c $< -o $@
$(B)/emu/%.o: tests/emu/%.cu | needs
	@mkdir -p $(@D)
	$(Q)$(EMU_CXX) -x c++ $(EMU_FLAGS) $(EMU_WATCH) -c $< -o $@
$(EMU_BIN): $(B)/emu/%: $(B)/emu/%.o $(EMU_OBJECTS) $(EMU_MACHINE)
	$(Q)$(EMU_CXX) $(LDFLAGS) -no-pie -o $@ $^ $(filter-out -lcudart_static,$(LIBS)) -lpthread
$(B)/emu/selftest: $(B)/emu/selftest.o $(EMU_MACHINE)
	$(Q)$(EMU_CXX) $(LDFLAGS) -no-pie -o $@ $^ -lpthread
.PHONY: emu check-emu
emu: $(EMU_BIN) $(B)/emu/selftest
check-emu: emu
	@tests/emu/run $(B)

# ---- tests/torture: faults, kills and power cuts; see its README ---------------------------------------------------------------
# The libraries for LD_PRELOAD replace functions of libc, so they are built without the compiler's knowledge of them.
TORTURE_LIB_FLAGS := -std=c11 -D_GNU_SOURCE -g -O2 -Wall -Wextra -Werror -fPIC -shared -fno-builtin -MMD -MP
TORTURE_BIN := $(B)/tests/torture/fault.so $(B)/tests/torture/record.so $(B)/tests/torture/torture $(B)/tests/torture/powercut
$(B)/tests/torture/%.so: tests/torture/%.c | needs
	@mkdir -p $(@D)
	$(Q)$(CC) $(TORTURE_LIB_FLAGS) -o $@ $< -ldl -lpthread
$(B)/tests/torture/torture $(B)/tests/torture/powercut: $(B)/tests/torture/%: tests/torture/%.c tests/torture/scenarios.c $(call libs_for,base)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -Itests/torture $(LDFLAGS) -o $@ $< tests/torture/scenarios.c $(filter %.a,$^) $(LIBS)
.PHONY: torture
torture: $(TORTURE_BIN)

# ---- fuzzers: tests/fuzz/fuzz_<folder>_<what>.c with its corpus in tests/fuzz/corpus/<what> ---------
# tests/fuzz/run runs them. They need clang: the folders are compiled once more under $(B)/fuzz, with
# coverage and sanitizers. A replay feeds the same function the corpus alone, with any compiler.
FUZZ_SRC := $(sort $(wildcard tests/fuzz/fuzz_*.c))
fuzz_folder = $(word 2,$(subst _, ,$(notdir $(1))))
FUZZ_CFLAGS := -O1 -g -std=c11 -D_GNU_SOURCE -Isrc -fopenmp -MMD -MP -fsanitize=fuzzer-no-link,address,undefined \
               -fno-sanitize-recover=all $(PKG_CFLAGS)
fuzz_lib = $(B)/fuzz/lib$(1).a
fuzz_libs = $(foreach f,$(call linked,$(call fuzz_folder,$(1))),$(call fuzz_lib,$(f)))
$(B)/fuzz/%.o: src/%.c | needs
	@mkdir -p $(@D)
	$(Q)clang $(FUZZ_CFLAGS) -c $< -o $@
# Of the fast CPU ops those for any processor, which compile quickly; they share their sources with the others.
$(B)/fuzz/ops/ops.o: FUZZ_CFLAGS += -DOPS_BASE_ONLY
$(B)/fuzz/token/regex.o: FUZZ_CFLAGS += $(CFLAGS_regex)
$(B)/fuzz/%.base.o: src/%.c | needs
	@mkdir -p $(@D)
	$(Q)clang $(FUZZ_CFLAGS) -Wno-pass-failed -fopenmp-simd -DISA=base -c $< -o $@
define fuzz_lib_rules
$$(call fuzz_lib,$(1)): $$(patsubst src/%.c,$$(B)/fuzz/%.o,$$(filter-out %_cpu.c %/mpi.c,$$(call sources,$(1)))) \
                        $$(if $$(filter ops,$(1)),$$(patsubst src/%.c,$$(B)/fuzz/%.base.o,$$(call isa_sources,$(1))))
	@mkdir -p $$(@D) && rm -f $$@ && ar rcs $$@ $$^
endef
$(foreach f,$(FOLDERS),$(eval $(call fuzz_lib_rules,$(f))))
define fuzz_rules
$$(B)/$(1:.c=): $(1) $$(call fuzz_libs,$(1))
	@mkdir -p $$(@D)
	$$(Q)clang $$(FUZZ_CFLAGS) -fsanitize=fuzzer -o $$@ $(1) -Wl,--start-group $$(call fuzz_libs,$(1)) -Wl,--end-group $$(call more_libs,$(call fuzz_folder,$(1))) $$(LIBS)
$$(B)/$(1:.c=).replay: $(1) tests/fuzz/replay.c $$(call libs_for,$(call fuzz_folder,$(1)))
	@mkdir -p $$(@D)
	$$(Q)$$(CC) $$(CFLAGS) $$(LDFLAGS) -Wno-missing-prototypes -o $$@ $(1) tests/fuzz/replay.c -Wl,--start-group \
	  $$(call libs_for,$(call fuzz_folder,$(1))) -Wl,--end-group $$(call more_libs,$(call fuzz_folder,$(1))) $$(LIBS)
endef
$(foreach t,$(FUZZ_SRC),$(eval $(call fuzz_rules,$(t))))
.PHONY: fuzz fuzz-replay
fuzz: $(FUZZ_SRC:%.c=$(B)/%)
fuzz-replay: $(FUZZ_SRC:%.c=$(B)/%.replay)

# ---- docs/options.md is the option table, written out -------------------------------------------
.PHONY: docs
docs: $(B)/braid
	@$(B)/braid help docs > $(B)/options.md && mv $(B)/options.md docs/options.md

# Sources as tests/budget.txt counts them; tests/cmd/test_size.sh holds the budgets.
SOURCE_NAMES := \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.def' \)
size:
	@printf "%-9s %7s %7s\n" folder lines budget; grep -vE '^(#|$$)' tests/budget.txt | while read -r f budget why; do \
	  printf "%-9s %7d %7d\n" $$f $$(find src/$$f -type f $(SOURCE_NAMES) -exec cat {} + | wc -l) $$budget; done
	@printf "%-9s %7d\n" src $$(find src -type f $(SOURCE_NAMES) -exec cat {} + | wc -l) tests $$(find tests -type f $(SOURCE_NAMES) -exec cat {} + | wc -l)
	@echo "longest files:"; find src tests -type f $(SOURCE_NAMES) -exec wc -l {} + | grep -v ' total$$' | sort -rn | head

# Registers that do not fit go to memory. ptxas says so for every kernel while it is compiled; $(NVCC)'s rule keeps that.
.PHONY: spills
spills:
	@tools/spills $(B)

format:
	@tools/format

clean:
	rm -rf $(B)

-include $(shell find $(B) -name '*.d' 2>/dev/null)
