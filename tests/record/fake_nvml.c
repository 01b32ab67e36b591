// What fake_nvml.py builds: known answers, NVML's struct layouts, and a handle that does not fit in 32 bits.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GPU ((void *)0x7f00000012345678ULL)
#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define NUM_PROCESSES 20

typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process_t;

static int setting(const char *name) {
    const char *value = getenv(name);
    return value ? atoi(value) : 0;
}

static pid_t owner;

// NVML may hold a lock when the process forks: a child that calls it is wrong, and dies of it here.
static void refuse_children(void) {
    if (getpid() != owner) _exit(99);
}

static int answer(void *device) {
    refuse_children();
    return device == GPU ? setting("FAKE_NVML_CODE") : INVALID_ARGUMENT;
}

static int write_text(char *text, unsigned int size, const char *value) {
    if (strlen(value) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(text, value);
    return SUCCESS;
}

int nvmlInit_v2(void) { owner = getpid(); return setting("FAKE_NVML_INIT"); }
int nvmlShutdown(void) { refuse_children(); return SUCCESS; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : "Other"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { return write_text(text, size, "580.95.05"); }

int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = GPU; return index ? INVALID_ARGUMENT : SUCCESS; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "GPU-12345678-1234-1234-1234-123456789abc")) return NOT_FOUND;
    *device = GPU;
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned int size) {
    return device == GPU ? write_text(text, size, "GPU-12345678-1234-1234-1234-123456789abc") : INVALID_ARGUMENT;
}
int nvmlDeviceGetName(void *device, char *text, unsigned int size) {
    const char *name = getenv("FAKE_NVML_NAME");
    return device == GPU ? write_text(text, size, name ? name : "NVIDIA H200") : INVALID_ARGUMENT;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
    usleep(1000 * setting("FAKE_NVML_SLEEP_MS"));
    rates->gpu = 97;
    rates->memory = 40;
    return answer(device);
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) { *milliwatts = 512345; return answer(device); }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    *millijoules = 9876543210123ULL;
    return answer(device);
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned int *mhz) {
    *mhz = kind == 1 ? 1980 : kind == 2 ? 3201 : 0;
    return answer(device);
}
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned int *mhz) {
    *mhz = kind == 1 ? 1980 : 0;
    return answer(device);
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *milliwatts) { *milliwatts = 600000; return answer(device); }
#ifndef OLD_DRIVER
int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned int *milliwatts) {
    *milliwatts = 700000;
    return answer(device);
}
#endif
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 150754820096ULL;
    memory->free = 69150441472ULL;
    memory->used = 81604378624ULL;
    return answer(device);
}

static int throttle(void *device, unsigned long long *mask) {
    *mask = (unsigned long long)setting("FAKE_NVML_THROTTLE");
    return answer(device);
}

// The first two are the caller and a training run; the rest only make the list longer than one guess.
static int processes(void *device, unsigned int *count, process_t *infos) {
    refuse_children();
    unsigned int room = *count;
    *count = NUM_PROCESSES;
    if (room < NUM_PROCESSES) return INSUFFICIENT_SIZE;
    for (unsigned int index = 0; index < NUM_PROCESSES; index++)
        infos[index] = (process_t){1000 + index, index == 2 ? ~0ULL : 1ULL << 33, ~0U, ~0U};
    infos[0].pid = (unsigned int)getpid();
    infos[1].pid = 4242;
    return answer(device);
}

#ifdef OLD_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *mask) { return throttle(device, mask); }
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned int *count, process_t *infos) { return processes(device, count, infos); }
#else
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *mask) { return throttle(device, mask); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, process_t *infos) { return processes(device, count, infos); }
#endif

int nvmlSystemGetProcessName(unsigned int pid, char *text, unsigned int size) {
    return pid == 4242 ? write_text(text, size, "python train.py") : NOT_FOUND;
}
