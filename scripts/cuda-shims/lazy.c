// One NVIDIA library, loaded at the first call of one of its functions instead of at the start of the program: the
// same binary starts on a login node without a driver and on a GPU node.
//
// Compiled once a library; -DLIB names it, and LIST_H, written by generate.py, brings its data:
//   LIBNAME, ERR_NOLIB, ERR_NOSYM  its name, and its own codes for "cannot be loaded" and "no such function"
//   sonames[], companions[]        what to load; what to load before it, from the same folder
//   names[], kinds[]               its functions and what each returns
// generate.py also writes the trampolines: each jumps through its slot, which at first leads to lazy_LIB_resolve.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <glob.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JOIN_(a, b, c) a##b##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define SYMBOL(x) JOIN(lazy_, LIB, x)
#include LIST_H

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int tried;           // set once, after handle, found and why
static void *handle;
static char found[4096];    // the file that was loaded
static char why[1024];      // or why none was

static int is_set(const char *variable) {
    const char *value = getenv(variable);
    return value && *value && strcmp(value, "0") != 0;
}

// A file that is there but does not load says more than one that is absent: the first such message is kept.
static void *load(const char *file) {
    void *library = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    if (library) {
        snprintf(found, sizeof found, "%s", file);
        return library;
    }
    const char *message = dlerror();
    if (message && !why[0] && !strstr(message, "No such file")) snprintf(why, sizeof why, "%s", message);
    return NULL;
}

static void *load_from(const char *folder) {
    char path[4096];
    for (int i = 0; companions[i]; i++) {
        glob_t files;
        snprintf(path, sizeof path, "%s/%s", folder, companions[i]);
        if (glob(path, 0, NULL, &files) == 0) dlopen(files.gl_pathv[0], RTLD_NOW | RTLD_GLOBAL);
        globfree(&files);
    }
    void *library = NULL;
    for (int i = 0; sonames[i] && !library; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, sonames[i]);
        library = load(path);
    }
    return library;
}

// `list` is folders separated by ':'; each may be a glob pattern.
static void *load_from_any(const char *list) {
    char *copy = strdup(list), *state = NULL;
    void *library = NULL;
    for (char *pattern = copy ? strtok_r(copy, ":", &state) : NULL; pattern && !library; pattern = strtok_r(NULL, ":", &state)) {
        glob_t folders;
        if (glob(pattern, 0, NULL, &folders) == 0)
            for (size_t i = 0; i < folders.gl_pathc && !library; i++) library = load_from(folders.gl_pathv[i]);
        globfree(&folders);
    }
    free(copy);
    return library;
}

// The folders of `format` (each %s is the variable's value), if the variable is set.
static void *load_from_variable(const char *variable, const char *format) {
    char list[8192];
    const char *value = getenv(variable);
    if (!value || !*value) return NULL;
    snprintf(list, sizeof list, format, value, value);
    return load_from_any(list);
}

// The order of docs/gpu.md: where the user says, the loader's own places, toolkits, Python environments, usual places.
static void *search(void) {
    void *library = NULL;
    if ((library = load_from_variable("CUDA_LAZY_PATH", "%s"))) return library;
    for (int i = 0; sonames[i]; i++)
        if ((library = load(sonames[i]))) return library;
    const char *const toolkits[] = {"CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"};
    for (int i = 0; i < 3; i++)
        if ((library = load_from_variable(toolkits[i], "%s/lib64:%s/lib"))) return library;
    const char *const environments[] = {"VIRTUAL_ENV", "CONDA_PREFIX"};
    for (int i = 0; i < 2; i++)
        if ((library = load_from_variable(environments[i], "%s/lib/python3*/site-packages/nvidia/*/lib:%s/lib"))) return library;
    if ((library = load_from_any(
             "/usr/local/cuda/lib64:/usr/local/cuda-13*/lib64:/usr/local/cuda*/targets/x86_64-linux/lib"
             ":/usr/local/nvidia/lib64:/usr/local/nvidia/lib:/usr/lib/x86_64-linux-gnu:/usr/lib64:/usr/lib/wsl/lib"
             ":/opt/*/.venv/lib/python3*/site-packages/nvidia/*/lib:/opt/*/lib/python3*/site-packages/nvidia/*/lib"
             ":/usr/local/lib/python3*/*-packages/nvidia/*/lib:/usr/lib/python3/dist-packages/nvidia/*/lib")))
        return library;
    return load_from_variable("HOME", "%s/.local/lib/python3*/site-packages/nvidia/*/lib");
}

static void ensure(void) {
    if (__atomic_load_n(&tried, __ATOMIC_ACQUIRE)) return;
    pthread_mutex_lock(&lock);
    if (!tried) {
        if (is_set("CUDA_LAZY_DISABLE")) snprintf(why, sizeof why, "CUDA_LAZY_DISABLE is set");
        else handle = search();
        if (!handle && !why[0]) snprintf(why, sizeof why, "%s not found", sonames[0]);
        if (is_set("CUDA_LAZY_DEBUG")) fprintf(stderr, "cuda-lazy: %s: %s\n", LIBNAME, handle ? found : why);
        __atomic_store_n(&tried, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
}

// What stands in for a function that is not to be had, by what it returns: a code, a text, nothing of note, or a text
// through its second argument.
static long no_library(void) { return ERR_NOLIB; }
static long no_function(void) { return ERR_NOSYM; }
static const char *as_text(void) { return "NVIDIA library not loaded: " LIBNAME; }
static long as_zero(void) { return 0; }
static long as_text_out(int code, const char **text) {
    (void)code;
    if (text) *text = as_text();
    return 0;
}

extern void *SYMBOL(_slots)[] __attribute__((visibility("hidden")));

// Called by a trampoline whose slot is not filled yet; fills it, so that later calls cost one jump.
__attribute__((visibility("hidden"))) void *SYMBOL(_resolve)(long i) {
    ensure();
    void *function = handle ? dlsym(handle, names[i]) : NULL;
    if (!function) {
        if (handle && is_set("CUDA_LAZY_DEBUG")) fprintf(stderr, "cuda-lazy: %s: no function %s\n", LIBNAME, names[i]);
        switch (kinds[i]) {
        case 's': function = (void *)as_text; break;
        case 'z': function = (void *)as_zero; break;
        case 'o': function = (void *)as_text_out; break;
        default: function = handle ? (void *)no_function : (void *)no_library;
        }
    }
    __atomic_store_n(&SYMBOL(_slots)[i], function, __ATOMIC_RELEASE);
    return function;
}

// For a program that wants to say more than an error code: 1 and the file that was loaded, or 0 and why none was.
int SYMBOL(_status)(const char **text) {
    ensure();
    if (text) *text = handle ? found : why;
    return handle != NULL;
}
