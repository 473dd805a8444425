/* XLA's CPU client as the "TPU" of TorchTPU: a PJRT plugin that hands calls on to the one that CPU_CLIENT names.
 * It takes part in three of them:
 *   create: a CPU client refuses the options that TorchTPU has for a TPU;
 *   devices: a CPU client has several, and TorchTPU wants one for each process;
 *   compile: with PROGRAMS=folder it writes each program there, numbered, before it is compiled. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "pjrt_c_api.h"

static const PJRT_Api *client;

static PJRT_Error *create_client(PJRT_Client_Create_Args *args) {
  args->num_options = 0;
  return client->PJRT_Client_Create(args);
}

static PJRT_Error *addressable_devices(PJRT_Client_AddressableDevices_Args *args) {
  PJRT_Error *error = client->PJRT_Client_AddressableDevices(args);
  if (!error && args->num_addressable_devices > 1) args->num_addressable_devices = 1;
  return error;
}

static PJRT_Error *compile(PJRT_Client_Compile_Args *args) {
  static int number;
  const char *folder = getenv("PROGRAMS");
  char path[4096];
  if (folder && snprintf(path, sizeof path, "%s/%04d.mlir", folder, number++) < (int)sizeof path) {
    FILE *file = fopen(path, "wb");
    if (file) {
      fwrite(args->program->code, 1, args->program->code_size, file);
      fclose(file);
    }
  }
  return client->PJRT_Client_Compile(args);
}

const PJRT_Api *GetPjrtApi(void) {
  static PJRT_Api *api;
  if (api) return api;
  const char *name = getenv("CPU_CLIENT");
  void *library = dlopen(name ? name : "", RTLD_NOW | RTLD_LOCAL);
  const PJRT_Api *(*get)(void) = library ? (const PJRT_Api *(*)(void))dlsym(library, "GetPjrtApi") : NULL;
  if (!get || !(client = get())) {
    fprintf(stderr, "CPU_CLIENT=%s is no PJRT plugin\n", name ? name : "");
    return NULL;
  }
  /* the client's structure may be longer than the header's */
  api = malloc(client->struct_size);
  memcpy(api, client, client->struct_size);
  api->PJRT_Client_Create = create_client;
  api->PJRT_Client_AddressableDevices = addressable_devices;
  api->PJRT_Client_Compile = compile;
  return api;
}
