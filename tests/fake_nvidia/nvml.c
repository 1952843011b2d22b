/* A stand-in for the driver's library libnvidia-ml.so.1, for machines without a GPU. It answers what nvidia-ml-py and torch ask with what
 * the file FAKE_NVIDIA_ML says, a GPU a line: its name, UUID, total and used MiB, utilization in percent, milliwatts, and, where it is
 * partitioned, the UUIDs of its MIG devices; fields are separated by tabs. Without the file there is no driver. The names and values of
 * errors and structures are those of NVIDIA's nvml.h. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };
enum { MOST = 16, MOST_PARTITIONS = 7, LONGEST = 96 };

typedef struct {
    char name[LONGEST], uuid[LONGEST], partitions[MOST_PARTITIONS][LONGEST];
    unsigned long long total_mib, used_mib;
    unsigned int utilization, milliwatts, count;
} Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;

static Device devices[MOST];
static unsigned int device_count;

static int load(void) {
    const char *path = getenv("FAKE_NVIDIA_ML");
    FILE *file = path == NULL ? NULL : fopen(path, "r");
    char line[2048];
    if (file == NULL) return DRIVER_NOT_LOADED;
    device_count = 0;
    memset(devices, 0, sizeof devices);
    while (device_count < MOST && fgets(line, sizeof line, file) != NULL) {
        Device *device = &devices[device_count];
        line[strcspn(line, "\n")] = '\0';
        char *rest = line, *field;
        for (int number = 0; (field = strsep(&rest, "\t")) != NULL; number++) {
            if (number == 0) snprintf(device->name, LONGEST, "%s", field);
            if (number == 1) snprintf(device->uuid, LONGEST, "%s", field);
            if (number == 2) device->total_mib = strtoull(field, NULL, 10);
            if (number == 3) device->used_mib = strtoull(field, NULL, 10);
            if (number == 4) device->utilization = (unsigned int)strtoul(field, NULL, 10);
            if (number == 5) device->milliwatts = (unsigned int)strtoul(field, NULL, 10);
            if (number > 5 && device->count < MOST_PARTITIONS) snprintf(device->partitions[device->count++], LONGEST, "%s", field);
        }
        device_count++;
    }
    fclose(file);
    return SUCCESS;
}

static int say(char *into, unsigned int length, const char *text) {
    snprintf(into, length, "%s", text);
    return SUCCESS;
}

int nvmlInit(void) { return load(); }
int nvmlInit_v2(void) { return load(); }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return load(); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "said by a stand-in"; }
int nvmlSystemGetDriverVersion(char *into, unsigned int length) { return say(into, length, "580.65.06"); }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = device_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    if (index >= device_count) return INVALID_ARGUMENT;
    *handle = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *into, unsigned int length) { return say(into, length, ((Device *)handle)->name); }

/* The handle of a MIG device is the text of its UUID here, which begins with M; a GPU's begins with the GPU's name. */
int nvmlDeviceGetUUID(void *handle, char *into, unsigned int length) {
    const char *text = handle;
    return say(into, length, strncmp(text, "MIG-", 4) == 0 ? text : ((Device *)handle)->uuid);
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    const Device *device = handle;
    memory->total = device->total_mib << 20;
    memory->used = device->used_mib << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *rates) {
    const Device *device = handle;
    if (device->count > 0) return NOT_SUPPORTED; /* as the driver says of one that is partitioned */
    rates->gpu = device->utilization;
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts) {
    *milliwatts = ((Device *)handle)->milliwatts;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending) {
    const Device *device = handle;
    if (strstr(device->name, "GeForce") != NULL) return NOT_SUPPORTED;
    *current = *pending = device->count > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count) {
    (void)handle;
    *count = MOST_PARTITIONS;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **partition) {
    Device *device = handle;
    if (index >= device->count) return NOT_FOUND;
    *partition = device->partitions[index];
    return SUCCESS;
}
